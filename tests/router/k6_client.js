// Asks a router by grpc-go, as k6 has it; the messages come from server reflection.
import grpc from 'k6/net/grpc';
import { check } from 'k6';

const CONNECTIONS = Number(__ENV.CONNECTIONS);
const CALLS = Number(__ENV.CALLS); // on each connection, all at once
// One virtual user: several that learn the messages at the same time make k6 panic now and then.
export const options = { thresholds: { checks: ['rate==1.0'] } };

const service = 'mii.v1.Inference';
const PATIENT = { timeout: '180s' }; // k6 itself takes most of a small machine's time

function expect(answer, what, right) {
  if (!check(answer, { [what]: right })) console.error(`${what}: ${JSON.stringify(answer)}`);
}

async function ask(client) {
  const models = await client.asyncInvoke(`${service}/ListModels`, {}, PATIENT);
  expect(models, 'a unary call', (r) =>
    r.status === grpc.StatusOK && r.message.models[0].maxLength === '1000');
  const refused = await client.asyncInvoke(`${service}/Tokenize`, { model: 'none' }, PATIENT);
  expect(refused, 'an error', (r) => r.status === grpc.StatusNotFound && r.error.message);
  const text = await new Promise((resolve) => {
    let text = '';
    const stream = new grpc.Stream(client, `${service}/Generate`);
    stream.on('data', (message) => { for (const delta of message.deltas) text += delta.text; });
    stream.on('error', (error) => resolve(error));
    stream.on('end', () => resolve(text));
    stream.write({ prompts: [{ text: 'a b c' }], stream: true });
    stream.end();
  });
  expect(text, 'a stream', (text) => text === 'a b c ');
}

export default async function () {
  const clients = [];
  for (let i = 0; i < CONNECTIONS; i++) {
    const client = new grpc.Client();
    client.connect(__ENV.ADDRESS, { plaintext: true, reflect: true, ...PATIENT });
    clients.push(client);
  }
  const calls = clients.flatMap((client) => Array.from({ length: CALLS }, () => ask(client)));
  await Promise.all(calls);
  clients.forEach((client) => client.close());
}
