// An environment that dials in to the reward hub of a run: it listens nowhere.
//
//     npm ci
//     node attached.js --attach 127.0.0.1:50390 --name exact --token-file exact.credentials
//
// The run declares `env: {exact: {attached: true}}`; `headrace env token exact --run RUN` prints what is in the file. Ctrl-C ends it.
'use strict';

const crypto = require('node:crypto');
const fs = require('node:fs');
const { setTimeout: pause } = require('node:timers/promises');
const { parseArgs } = require('node:util');
const { DESCRIPTION, grpc, isHere, score, tokenIn, v1 } = require('./environment.js');

const { values: options } = parseArgs({
  options: {
    attach: { type: 'string' },
    name: { type: 'string', default: 'exact' },
    capacity: { type: 'string', default: '16' },
    'token-file': { type: 'string' },
    'tls-ca': { type: 'string' }, // if an authority of your own signed the hub's certificate
  },
});
const capacity = Number(options.capacity);
if (!options.attach || !Number.isInteger(capacity) || capacity < 1) {
  console.error('give --attach HOST:PORT of the hub, and --capacity 1 or more');
  process.exit(2);
}

const FIRST_PAUSE_MS = 200;
const LAST_PAUSE_MS = 5000;
const GRACE_MS = 2000;
const KIND = 'WORK_KIND_SCORE';
// refusals that coming again won't change
const FINAL = ['INVALID_ARGUMENT', 'NOT_FOUND', 'PERMISSION_DENIED', 'UNAUTHENTICATED', 'UNIMPLEMENTED'];

const stopping = new AbortController();
for (const signal of ['SIGINT', 'SIGTERM']) {
  process.once(signal, () => stopping.abort());
}

main();

async function main() {
  const processId = crypto.randomUUID(); // a new stream of this process replaces its last one
  const client = dial();
  let wait = FIRST_PAUSE_MS;
  while (!stopping.signal.aborted) {
    const { attached, status } = await attach(client, processId);
    if (stopping.signal.aborted) {
      break;
    }
    const said = `${grpc.status[status.code]}: ${status.details}`;
    if (FINAL.includes(grpc.status[status.code])) {
      console.error(`${options.attach} refused environment ${options.name}: ${said}`);
      process.exitCode = 1;
      break;
    }
    console.error(`environment ${options.name} is not attached to ${options.attach} (${said}); trying again`);
    wait = attached ? FIRST_PAUSE_MS : Math.min(LAST_PAUSE_MS, 2 * wait);
    // many that lost one hub don't come back at once
    await pause(wait * (0.5 + Math.random() / 2), undefined, { signal: stopping.signal }).catch(() => {});
  }
  client.close();
}

function dial() {
  const authority = options['tls-ca'] && fs.readFileSync(options['tls-ca']);
  const credentials = isHere(options.attach) ? grpc.credentials.createInsecure() : grpc.credentials.createSsl(authority);
  return new v1.RewardService(options.attach, credentials, {
    'grpc.keepalive_time_ms': 10_000, // a hub that is gone without a word is noticed
    'grpc.keepalive_timeout_ms': 10_000,
    'grpc.max_receive_message_length': -1,
    'grpc.max_send_message_length': -1,
    // a hub that comes back is found at once, not after the channel's own pauses
    'grpc.initial_reconnect_backoff_ms': FIRST_PAUSE_MS,
    'grpc.max_reconnect_backoff_ms': LAST_PAUSE_MS,
  });
}

/** One stream, from `register` to its end. */
function attach(client, processId) {
  const metadata = new grpc.Metadata();
  if (options['token-file']) {
    metadata.set('authorization', `Bearer ${tokenIn(options['token-file'])}`);
  }
  const stream = client.Attach(metadata);
  const held = new Map(); // work that is not answered, by its id -> whether it was withdrawn
  let attached = false;
  let over = false;

  async function take({ work_id, deadline_ms, score: { trajectories } }) {
    held.set(work_id, false);
    let answered = false;
    let done = 0;
    const results = await score(trajectories, deadline_ms, () => (answered ? grant(1) : (done += 1)));
    const withdrawn = held.get(work_id);
    held.delete(work_id);
    answered = true;
    // what was withdrawn is answered too, and with nothing
    write({ answer: { work_id, ...(withdrawn ? {} : { score: { results } }) } });
    endIfStopped();
    grant(done); // what timed out takes its room until it ends
  }

  function grant(amount) {
    if (amount && !stopping.signal.aborted) {
      write({ credit: { name: options.name, kind: KIND, amount } });
    }
  }

  function write(event) {
    if (!over) {
      stream.write(event); // else nobody waits for it any more
    }
  }

  function endIfStopped() {
    if (stopping.signal.aborted && held.size === 0) {
      stream.end();
    }
  }

  function stop() {
    write({ drain: {} });
    endIfStopped();
    setTimeout(() => stream.cancel(), GRACE_MS).unref();
  }

  return new Promise((resolve) => {
    stream.on('data', (message) => {
      if (message.event === 'registered') {
        attached = true;
        console.error(`environment ${options.name} is attached to ${options.attach}`);
        grant(capacity); // the hub sends nothing that it has no credit for
      } else if (message.event === 'work') {
        take(message.work);
      } else if (message.event === 'cancel' && held.has(message.cancel.work_id)) {
        held.set(message.cancel.work_id, true);
      }
    });
    stream.on('error', () => {}); // `status` says the same
    stream.on('status', (status) => {
      over = true;
      stopping.signal.removeEventListener('abort', stop);
      resolve({ attached, status });
    });
    stopping.signal.addEventListener('abort', stop);
    write({
      register: { process_id: processId, offers: [{ name: options.name, kind: KIND, capacity, environment: DESCRIPTION }] },
    });
  });
}
