-- open_run: create the run if it does not exist, else set its limits. Calls of other builds are refused from now on.
-- KEYS     the run
-- ARGV     timeline, incarnation (nonces, used only for a new run; the timeline names this call too), all of LIMITS (_run.lua; `Limits` in
--          headrace/replay/records.py says what they mean), environments (for each name: failure_share, episodes (runners lease its
--          groups), and give_up_ms unless the run waits for it forever)
-- Returns  the run's state, msgpack
-- Errors   HR_TIMELINE (the call arrives late: another start of the replay service has set the limits since), HR_INVALID
-- uses: _args, _register, _run

local function environments(value, what)
  for env, setting in pairs(map(value, what)) do
    name(env, what)
    finite(map(setting, what).failure_share, 'failure_share')
    flag(setting.episodes, 'episodes')
    if setting.give_up_ms ~= nil then natural(setting.give_up_ms, 'give_up_ms') end
  end
  return cmsgpack.pack(value)
end

-- The parsers of the arguments: the limits that the files declare, and those that only this call has.
local function spec()
  local parsers = {timeline = name, incarnation = name, environments = environments}
  for limit_name, parse in pairs(LIMITS) do parsers[limit_name] = parse end
  return parsers
end

-- Under `drop`, a group over age is generated again. Episodes are too expensive for that, and long ones would be lost more often than short
-- ones.
local function require_no_episodes_dropped(limits)
  if limits.staleness_policy ~= 'drop' then return end
  for env, setting in pairs(cmsgpack.unpack(limits.environments)) do
    if setting.episodes then
      refuse('HR_INVALID', 'environment ' .. env .. ' has episodes, and staleness_policy is drop; set it to ordered or mask')
    end
  end
end

-- Returns whether the call is a repeat.
local function make_run(keys, args)
  local key = run_key(keys)
  local limits = parse_call(spec(), false, args)
  local timeline, incarnation, fields = limits.timeline, limits.incarnation, {}
  require_no_episodes_dropped(limits)
  limits.timeline, limits.incarnation = nil, nil
  for field, value in pairs(limits) do fields[#fields + 1], fields[#fields + 2] = field, value end
  if redis.call('EXISTS', key) == 0 then
    redis.call('HSET', key, 'timeline', timeline, 'incarnation', incarnation, 'next_step', 0, 'committed', -1,
      'enqueued', -1, 'closed', 0, 'tickets', 0, 'pinned', 0, 'top', 0, 'evicted', 0, 'freed', 0, 'refill', 0, 'bytes', 0, 'due', 1e15)
    redis.call('RPUSH', key .. ':' .. incarnation .. ':timelines', timeline .. ' 0')
  end
  local opened = redis.call('HGET', key, 'opened')
  if opened == timeline then return true end  -- also after a rewind has ended the timeline that this call began the run with
  require_unused({key = key}, timeline)
  if opened then redis.call('SADD', key .. ':used', opened) end
  redis.call('HSET', key, 'opened', timeline, 'build', BUILD, unpack(fields))
  return false
end

local function open_run(keys, args)
  local ok, again = pcall(make_run, keys, args)
  if not ok and again.code then return redis.error_reply(again.code .. ' ' .. again.message) end
  if not ok then return answer_failure('open_run', keys, again) end
  return respond('open_run', function(run)
    if not again then
      wake(run, 'work')
      event(run, 'opened')
    end
    return cmsgpack.pack(run_state(run))
  end, nil, false, keys, {}, false)
end

redis.register_function{function_name = function_name('open_run'), callback = open_run, flags = {'allow-oom'}}
