-- How a transition becomes a Redis function: load the run, expire what is due, do it, and write what is common once.

-- `arity`: how many arguments there must be; nil where the handler counts them.
local function answer(handler, arity, keys, args, call)
  call.run = load_run(keys)
  if arity and #args ~= arity then refuse('HR_INVALID', #args .. ' arguments, not ' .. arity) end
  if not call.reads then expire(call.run) end
  return handler(call.run, args)
end

local function respond(handler, arity, keys, args, reads)
  local call = {reads = reads}
  local ok, reply = pcall(answer, handler, arity, keys, args, call)
  local run = call.run
  local refused = not ok and type(reply) == 'table' and reply.code
  if run and not reads then
    if refused then count_refusal(run, reply.code) end
    flush_meters(run)
    flush(run)
  end
  if ok then return reply end
  if refused then return redis.error_reply(reply.code .. ' ' .. reply.message) end
  error(reply)
end

local function register(function_name, arity, handler)
  redis.register_function(function_name, function(keys, args) return respond(handler, arity, keys, args, false) end)
end

-- A function that changes nothing, not even what is due: for people, and for replicas of the server.
local function register_reader(function_name, arity, handler)
  redis.register_function{
    function_name = function_name,
    callback = function(keys, args) return respond(handler, arity, keys, args, true) end,
    flags = {'no-writes'},
  }
end

-- Refusal of one entry of a batch: counted, and handed back in the entry's place.
local function refuse_entry(run, code, message)
  count_refusal(run, code)
  return code .. ' ' .. message
end

-- Timelines that are remembered: a checkpoint from before the oldest of them is restored instead of rewound to.
local TIMELINES = 256

-- Law 4: names of timelines and incarnations are never used twice. A rewind or restore that arrives late, after another has ended what it
-- started, is refused: it would take the run back to where it was then.
local function require_unused(run, nonce)
  if redis.call('SISMEMBER', run.key .. ':used', nonce) == 1 then
    refuse('HR_TIMELINE', show(nonce) .. ' was used before, and has ended; make a new nonce')
  end
end

local function retire(run, nonce)
  redis.call('SADD', run.key .. ':used', nonce)
end

-- The weights go on from `version` on the timeline `timeline`: those that began at it or later are abandoned.
local function begin_timeline(run, version, timeline)
  local key = run.base .. 'timelines'
  while true do
    local last = redis.call('LINDEX', key, -1)
    if not last or tonumber(string.match(last, '%d+$')) < version then break end
    redis.call('RPOP', key)
  end
  redis.call('RPUSH', key, timeline .. ' ' .. version)
  redis.call('LTRIM', key, -TIMELINES, -1)
end

-- The run as `state` and the calls that change it as a whole answer: msgpack.
local function run_state(run)
  local counts = {}
  local flat = redis.call('HGETALL', run.base .. 'counts')
  for i = 1, #flat, 2 do
    counts[flat[i]] = tonumber(flat[i + 1]) + (run.deltas[flat[i]] or 0)
  end
  for field, delta in pairs(run.deltas) do
    if not counts[field] then counts[field] = delta end
  end
  return {
    timeline = run.timeline, incarnation = run.incarnation, next_step = run.next_step, committed = run.committed,
    enqueued = run.enqueued, closed = run.closed == 1, counts = counts, refill = run.refill == 1,
    timelines = redis.call('LRANGE', run.base .. 'timelines', 0, -1),
  }
end
