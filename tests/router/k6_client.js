// Asks a router by grpc-go, as k6 has it; the messages come from server reflection.
import grpc from 'k6/net/grpc';
import { check } from 'k6';

const CALLS = Number(__ENV.CALLS);
export const options = {
  vus: Number(__ENV.CONNECTIONS), iterations: Number(__ENV.CONNECTIONS), // one each
  thresholds: { checks: ['rate==1.0'] },
};

const service = 'mii.v1.Inference';

export default async function () {
  const client = new grpc.Client();
  client.connect(__ENV.ADDRESS, { plaintext: true, reflect: true, timeout: '60s' });
  for (let call = 0; call < CALLS; call++) {
    const models = client.invoke(`${service}/ListModels`, {});
    check(models, {
      'a unary call': (r) => r.status === grpc.StatusOK && r.message.models[0].maxLength === '1000',
    });
    const refused = client.invoke(`${service}/Tokenize`, { model: 'none' });
    check(refused, { 'an error': (r) => r.status === grpc.StatusNotFound && r.error.message });
  }
  const texts = await new Promise((resolve) => {
    let text = '';
    const stream = new grpc.Stream(client, `${service}/Generate`);
    stream.on('data', (message) => { for (const delta of message.deltas) text += delta.text; });
    stream.on('error', (error) => resolve(`error ${JSON.stringify(error)}`));
    stream.on('end', () => resolve(text));
    stream.write({ prompts: [{ text: 'a b c' }], stream: true });
    stream.end();
  });
  check(texts, { 'a stream': (text) => text === 'a b c ' });
  client.close();
}
