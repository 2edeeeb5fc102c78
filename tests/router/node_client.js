// Streams from a router with @grpc/grpc-js, from our .proto as it is; prints what comes, as JSON.
// usage: node node_client.js ADDRESS CHECKOUT
const grpc = require('@grpc/grpc-js');
const loader = require('@grpc/proto-loader');

const [address, checkout] = process.argv.slice(2);
const definition = loader.loadSync('mii/proto/inference.proto', {
  includeDirs: [checkout], keepCase: true, longs: Number, defaults: true,
});
const { Inference } = grpc.loadPackageDefinition(definition).mii.v1;
const client = new Inference(address, grpc.credentials.createInsecure());

function generate(request) {
  return new Promise((resolve) => {
    const result = { texts: {}, ends: {} };
    const call = client.Generate(request);
    call.on('data', (message) => {
      for (const delta of message.deltas) {
        const index = delta.prompt_index;
        result.texts[index] = (result.texts[index] || '') + delta.text;
        if (delta.finish_reason) result.ends[index] = delta.finish_reason;
      }
    });
    call.on('error', (error) => resolve({ code: error.code, details: error.details }));
    call.on('end', () => resolve(result));
  });
}

(async () => {
  const prompts = [{ text: 'a b c' }, { text: 'd e' }];
  const stream = await generate({ prompts, stream: true, sampling: { max_new_tokens: 2 } });
  const refused = await generate({ prompts, sampling: { top_p: 7 } });
  console.log(JSON.stringify([stream, refused]));
  client.close();
})();
