-- How a transition becomes a Redis function: load the run, expire what is due, run the handler, and write the shared fields once.
-- uses: _args, _due, _fleet, _group, _meter, _run

-- `BUILD`, the digest of these files, and `COMMANDS`, the commands of each function, are declared before them (library.py). A server that
-- several installations share has the functions of each of their builds.
local function function_name(transition) return 'hr_' .. BUILD .. '_' .. transition end

-- `spec` (name -> parser) are the named arguments, or nil if there are none. `bytes`: arguments that are bytes follow.
local function parse_call(spec, bytes, args)
  local most = spec and 1 or 0
  if #args > most and not bytes then refuse('HR_INVALID', #args .. ' arguments, not ' .. most) end
  return spec and named(spec, args[1])
end

local function answer(call, handler, spec, bytes, keys, args)
  call.run = load_run(keys)
  if call.fills and call.run.full > 0 then set(call.run, 'full', 0) end  -- the server accepted it
  local parsed = parse_call(spec, bytes, args)
  if not call.reads then expire(call.run) end
  return handler(call.run, parsed, args)
end

local function answer_or_raise(handler, spec, bytes, keys, args, reads, fills)
  local call = {reads = reads, fills = fills}
  local ok, reply = pcall(answer, call, handler, spec, bytes, keys, args)
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

-- The server's words for a command that the caller has no right to. Those of Redis 7.0 don't name it.
local function is_denied(reply)
  local said = type(reply) == 'table' and reply.err or tostring(reply)
  return string.find(said, 'ACL failure in script', 1, true) or string.find(said, "The user executing the script can't", 1, true)
end

-- The commands of a function that the caller has no right to.
local function lacking(transition, keys)
  local found, key = {}, keys[1] .. ':x'  -- any argument may be a key
  for command in string.gmatch(COMMANDS[transition], '%S+') do
    if not redis.acl_check_cmd(command, key, key, key) then found[#found + 1] = command end
  end
  return table.concat(found, ', ')
end

-- The answer to a call that raised `reply`.
local function answer_failure(transition, keys, reply)
  if is_denied(reply) then return redis.error_reply('HR_DENIED ' .. lacking(transition, keys)) end
  error(reply)
end

local function respond(transition, handler, spec, bytes, keys, args, reads, fills)
  local ok, reply = pcall(answer_or_raise, handler, spec, bytes, keys, args, reads, fills)
  if ok then return reply end
  return answer_failure(transition, keys, reply)
end

-- The handler is called with the run, its named arguments, and all arguments: from the second on they are bytes. At the server's memory
-- limit, functions that free, prove or move something are allowed; Redis refuses a function that `fills` it.
local function register(transition, spec, handler, bytes, fills)
  redis.register_function{
    function_name = function_name(transition),
    callback = function(keys, args) return respond(transition, handler, spec, bytes, keys, args, false, fills) end,
    flags = not fills and {'allow-oom'} or nil,
  }
end

-- A function that changes nothing, and does not expire what is due: for people, and for replicas of the server.
local function register_reader(transition, spec, handler)
  redis.register_function{
    function_name = function_name(transition),
    callback = function(keys, args) return respond(transition, handler, spec, false, keys, args, true) end,
    flags = {'no-writes'},
  }
end

-- The refusal of one entry of a batch, which is counted and returned in the entry's place.
local function refuse_entry(run, code, message)
  count_refusal(run, code)
  return code .. ' ' .. message
end

-- The number of timelines that are remembered. A checkpoint from before the oldest of them needs a restore instead of a rewind.
local TIMELINES = 256

-- Law 4: names of timelines and incarnations are never reused. A rewind or restore that arrives late, after another has ended what it
-- started, is refused, because it would take the run back to that time.
local function require_unused(run, nonce)
  if redis.call('SISMEMBER', run.key .. ':used', nonce) == 1 then
    refuse('HR_TIMELINE', show(nonce) .. ' was used before and has ended; use a new nonce')
  end
end

local function retire(run, nonce)
  redis.call('SADD', run.key .. ':used', nonce)
end

-- The weights continue from `version` on `timeline`. Timelines that began at that version or later are abandoned, and no weights of an
-- earlier one are on offer any more.
local function begin_timeline(run, version, timeline)
  local key = run.base .. 'timelines'
  while true do
    local last = redis.call('LINDEX', key, -1)
    if not last or tonumber(string.match(last, '%d+$')) < version then break end
    redis.call('RPOP', key)
  end
  redis.call('UNLINK', run.base .. 'offer', run.base .. 'offers')
  redis.call('RPUSH', key, timeline .. ' ' .. version)
  redis.call('LTRIM', key, -TIMELINES, -1)
end

-- The number of groups by lane and state, for lanes that have any.
local function counts_of(run)
  local counts = {}
  local function count(field, number)
    local lane, state = string.match(field, '^(%a+):(%a+)$')
    counts[lane] = counts[lane] or {}
    counts[lane][state] = (counts[lane][state] or 0) + number
  end
  local flat = redis.call('HGETALL', run.base .. 'counts')
  for i = 1, #flat, 2 do count(flat[i], tonumber(flat[i + 1])) end
  for field, delta in pairs(run.deltas) do count(field, delta) end
  return counts
end

-- The number of episode groups that wait for a runner: those that lost their lease, validation groups, those passed over, or the first in
-- the queue.
local function count_waiting_episodes(run)
  local count = 0
  for _, place in ipairs({'orphans', 'suspects', 'validation', 'passed'}) do
    count = count + redis.call('ZCARD', of_kind(run, place, 'episodes'))
  end
  local first = redis.call('ZRANGE', queue_of(run, 'train'), 0, 0)[1]
  return count + (first and redis.call('HEXISTS', group_key(run, first), 'kind') or 0)
end

local function count_runners(run)
  local count = 0
  for _, holder in ipairs(redis.call('ZRANGE', run.base .. 'runners', 0, -1)) do
    if redis.call('HGET', replica_key(run, holder), 'state') == 'ALIVE' then count = count + 1 end
  end
  return count
end

-- The run in msgpack, as `state` and the calls that change the whole run return it.
local function run_state(run)
  local timelines = redis.call('LRANGE', run.base .. 'timelines', 0, -1)
  for i, line in ipairs(timelines) do
    local timeline, version = string.match(line, '^(.*) (%d+)$')
    timelines[i] = {timeline, tonumber(version)}
  end
  return {
    run_id = string.match(run.key, '^hr:{(.*)}$'), timeline = run.timeline, incarnation = run.incarnation, next_step = run.next_step,
    committed = run.committed, enqueued = run.enqueued, closed = run.closed == 1, counts = counts_of(run).train,
    refill = run.refill == 1, wanted = redis.call('ZCARD', run.base .. 'wanted'), timelines = timelines,
    episodes = count_waiting_episodes(run), alive_runners = count_runners(run),
    validation = redis.call('EXISTS', run.base .. 'lane') == 1 and (run.validation or 0) or -1,
  }
end
