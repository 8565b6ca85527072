-- open_run: make the run if it is not there, else give it these limits.
-- KEYS     the run
-- ARGV     timeline, incarnation (nonces, used only for a new run), the limits by their names in _run.lua, environments (of each name
--          failure_share, and give_up_ms if the run does not wait for it for ever)
-- Returns  the run's state, msgpack
-- Errors   HR_INVALID
-- uses: _args, _filter, _group, _register, _run

-- What a group may have beyond n: its trajectories are arguments of one command.
local MOST_REDUNDANT = 1024

local function redundant(value, what)
  if natural(value, what) > MOST_REDUNDANT then
    refuse('HR_INVALID', 'redundant is ' .. value .. ', more than ' .. MOST_REDUNDANT .. '; lower replay.redundant_generations')
  end
  return value
end

local function filter(value, what)
  if text(value, what) ~= '' and not parse_filter(value) then refuse('HR_INVALID', 'filter is ' .. show(value)) end
  return value
end

local function environments(value, what)
  for env, setting in pairs(map(value, what)) do
    name(env, what)
    finite(map(setting, what).failure_share, 'failure_share')
    if setting.give_up_ms ~= nil then natural(setting.give_up_ms, 'give_up_ms') end
  end
  return cmsgpack.pack(value)
end

-- The limits, by the names that the run has them under (_run.lua).
local SPEC = {
  timeline = name, incarnation = name,
  prompts_per_step = positive, generations_per_prompt = positive, max_age = natural, max_attempts = positive,
  max_scoring_attempts = positive, lease_ms = positive, group_deadline_ms = positive, scoring_deadline_ms = positive,
  replica_dead_ms = positive, max_bytes = positive, ahead_steps = natural, redundant = redundant, max_scored = natural,
  retain_steps = natural, staleness_policy = one_of({'ordered', 'drop', 'mask'}), filter = filter, environments = environments,
}

local function make_run(keys, args)
  local key = run_key(keys)
  local limits = parse_call(SPEC, false, args)
  local timeline, incarnation, fields = limits.timeline, limits.incarnation, {}
  limits.timeline, limits.incarnation = nil, nil
  for field, value in pairs(limits) do fields[#fields + 1], fields[#fields + 2] = field, value end
  if redis.call('EXISTS', key) == 0 then
    redis.call('HSET', key, 'timeline', timeline, 'incarnation', incarnation, 'next_step', 0, 'committed', -1,
      'enqueued', -1, 'closed', 0, 'tickets', 0, 'pinned', 0, 'top', 0, 'evicted', 0, 'freed', 0, 'refill', 0, 'bytes', 0, 'due', 1e15)
    redis.call('RPUSH', key .. ':' .. incarnation .. ':timelines', timeline .. ' 0')
  end
  redis.call('HSET', key, unpack(fields))
end

-- An earlier build kept all that waited for scores in one line.
local function split_line(run)
  for _, place in ipairs({'unscored', 'taken'}) do
    for _, member in ipairs(redis.call('ZRANGE', run.base .. place, 0, -1)) do
      local env = environment_of(run, load_group(run, (split_member(member))))
      redis.call('ZADD', place_of(run, place, env), redis.call('ZSCORE', run.base .. place, member), member)
    end
    redis.call('UNLINK', run.base .. place)
  end
end

redis.register_function('hr_open_run', function(keys, args)
  local ok, problem = pcall(make_run, keys, args)
  if not ok and problem.code then return redis.error_reply(problem.code .. ' ' .. problem.message) end
  if not ok then error(problem) end
  return respond(function(run)
    split_line(run)
    wake(run, 'work')
    event(run, 'opened')
    return cmsgpack.pack(run_state(run))
  end, nil, false, keys, {}, false)
end)
