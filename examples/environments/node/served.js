// An environment that listens, and that the reward hub of a run dials.
//
//     npm ci
//     node served.js --port 50400            # the run has `env: {exact: {target: "127.0.0.1:50400"}}`
//
// `headrace up` starts it by itself with `env: {exact: {command: [node, served.js]}}`, and tells it by variables where to listen and
// whose token to accept.
'use strict';

const crypto = require('node:crypto');
const { parseArgs } = require('node:util');
const { DESCRIPTION, grpc, isHere, score, tokenIn, v1 } = require('./environment.js');

const { values: options } = parseArgs({
  options: {
    host: { type: 'string', default: process.env.ENVIRONMENT_HOST ?? '127.0.0.1' },
    port: { type: 'string', default: process.env.ENVIRONMENT_PORT ?? '50400' },
    capacity: { type: 'string', default: '16' },
    'token-file': { type: 'string', default: process.env.ENVIRONMENT_TOKEN_FILE },
  },
});
const capacity = Number(options.capacity);
const expected = options['token-file'] && digest(`Bearer ${tokenIn(options['token-file'])}`);
let busy = 0; // trajectories at work

function digest(text) {
  return crypto.createHash('sha256').update(text).digest();
}

/** A handler for callers that present the token alone. */
function guarded(handler) {
  return (call, callback) => {
    const presented = digest(String(call.metadata.get('authorization')[0] ?? ''));
    if (expected && !crypto.timingSafeEqual(presented, expected)) {
      callback({ code: grpc.status.UNAUTHENTICATED, details: "present the environment's token" });
    } else {
      handler(call, callback);
    }
  };
}

function describe(call, callback) {
  callback(null, { ...DESCRIPTION, capacity });
}

async function scoreBatch(call, callback) {
  const { trajectories } = call.request;
  const begun = trajectories.slice(0, Math.max(0, capacity - busy));
  busy += begun.length;
  const results = await score(begun, call.getDeadline() - Date.now(), () => (busy -= 1));
  // it has no room for the rest, which costs them nothing
  const rest = trajectories.slice(begun.length).map(() => ({ status: 'STATUS_NOT_STARTED', message: 'no room' }));
  callback(null, { results: [...results, ...rest] });
}

const address = `${options.host}:${options.port}`;
if (!isHere(address)) {
  console.error(`${address} is not on the loopback interface: for another machine, use grpc.ServerCredentials.createSsl`);
  process.exit(2);
}
const server = new grpc.Server({ 'grpc.max_receive_message_length': -1, 'grpc.max_send_message_length': -1 });
server.addService(v1.EnvironmentService.service, { Describe: guarded(describe), Score: guarded(scoreBatch) });
server.bindAsync(address, grpc.ServerCredentials.createInsecure(), (error, port) => {
  if (error) {
    console.error(`${address}: ${error.message}`);
    process.exit(1);
  }
  console.error(`environment ${DESCRIPTION.name} listens on ${options.host}:${port}`);
});
for (const signal of ['SIGINT', 'SIGTERM']) {
  process.once(signal, () => {
    server.tryShutdown(() => process.exit(0)); // what is under way is answered
    setTimeout(() => process.exit(0), 2000).unref();
  });
}
