// The reward, and what a program needs in order to answer with it: the contract, and one result for each trajectory.
'use strict';

const { AsyncLocalStorage } = require('node:async_hooks');
const fs = require('node:fs');
const path = require('node:path');
const grpc = require('@grpc/grpc-js');
const protoLoader = require('@grpc/proto-loader');

const PROTO = process.env.PROTO ?? path.join(__dirname, '../../../proto');
const contract = protoLoader.loadSync(['headrace/v1/environment.proto', 'headrace/v1/reward.proto'], {
  includeDirs: [PROTO],
  keepCase: true,
  enums: String,
  defaults: true, // absent fields are empty, but for those that are `optional`
  oneofs: true, // `message.event` names the field that is set
});
const { v1 } = grpc.loadPackageDefinition(contract).headrace;

const DESCRIPTION = { name: 'Exact', build: '1', description: '1 for the expected answer and nothing else' };
// An answer that comes back after its deadline is worth nothing, and the machine may stand still meanwhile. Of short times, a tenth.
const ON_THE_WAY_MS = 5000;

/** Your reward: a finite number, or a Result (proto/headrace/v1/trajectory.proto). What it throws is STATUS_FAILED, and tried again. */
async function reward(trajectory) {
  const { answer } = JSON.parse(trajectory.extra_env_info_json || '{}');
  if (answer === undefined) {
    return { status: 'STATUS_INVALID', message: 'extra_env_info has no answer' };
  }
  return trajectory.completion.trim() === String(answer) ? 1 : 0;
}

/**
 * Begin to score these trajectories, and return one result for each, in order and within the time. `freed` is called for each when nothing
 * is at work on it any more, which may be later, since JavaScript can't stop what is under way.
 */
async function score(trajectories, timeMs, freed) {
  const began = performance.now();
  const work = trajectories.map((trajectory) => scoreOne(trajectory, began));
  let timer;
  const late = new Promise((resolve) => {
    // the longest that a timer takes
    timer = setTimeout(resolve, Math.min(Math.max(0, timeMs - Math.min(ON_THE_WAY_MS, timeMs / 10)), 2 ** 31 - 1), {
      ...who(began),
      status: 'STATUS_TIMED_OUT',
      message: 'not done by its deadline',
    });
  });
  work.forEach((each) => each.then(freed));
  const results = await Promise.all(work.map((each) => Promise.race([each, late])));
  clearTimeout(timer);
  return results;
}

/** The result of one trajectory, whatever the reward throws or returns: it never rejects, since the others of the call would fail with it. */
async function scoreOne(trajectory, began) {
  try {
    const given = await new Promise((resolve, reject) => failing.run(reject, () => reward(trajectory).then(resolve, reject)));
    const result = typeof given === 'number' ? { status: 'STATUS_SCORED', reward: given } : given;
    if (!result?.status) {
      throw new TypeError('the reward is neither a number nor a Result with a status');
    }
    // NaN and Infinity are no rewards, and a failure is never a zero
    if (result.status === 'STATUS_SCORED' && !Number.isFinite(result.reward)) {
      throw new Error(`the reward is ${result.reward}, not a finite number`);
    }
    return sent({ ...who(began), ...result });
  } catch (error) {
    return sent({ ...who(began), status: 'STATUS_FAILED', message: told(error) });
  }
}

// What a reward throws later (in a timer, in a promise that nobody awaits) fails its trajectory, too: Node would end the process, and with
// it all other work.
const failing = new AsyncLocalStorage(); // the function that fails the trajectory at work
for (const event of ['uncaughtException', 'unhandledRejection']) {
  process.on(event, (error) => {
    const fail = failing.getStore();
    if (!fail) {
      throw error; // no reward's
    }
    console.error(`a reward threw ${told(error)}`);
    fail(error);
  });
}

/** A result as the hub will read it. What can't be sent throws here, and not for the whole call; half a surrogate pair becomes U+FFFD. */
function sent(result) {
  const { responseSerialize, responseDeserialize } = v1.EnvironmentService.service.Score;
  return responseDeserialize(responseSerialize({ results: [result] })).results[0];
}

/** What was thrown, and where. Anything can be thrown, also what has no text. */
function told(error) {
  try {
    const place = /\n\s+at (.*)/.exec(error?.stack);
    return place ? `${error} (${place[1]})` : String(error);
  } catch {
    return `it threw a value without text (${typeof error})`;
  }
}

function who(began) {
  return { environment: DESCRIPTION.name, build: DESCRIPTION.build, took_ms: performance.now() - began };
}

/** The token in a file that `headrace env token` or `headrace up` wrote: the last word of `environment NAME TOKEN`. */
function tokenIn(file) {
  return fs.readFileSync(file, 'utf8').trim().split(/\s+/).pop();
}

/** Whether an address is on this machine. Nothing leaves it without TLS. */
function isHere(address) {
  return /^(127\.\d+\.\d+\.\d+|localhost|\[::1\]):\d+$/.test(address);
}

module.exports = { DESCRIPTION, grpc, isHere, score, tokenIn, v1 };
