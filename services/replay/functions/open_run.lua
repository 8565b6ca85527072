-- open_run: make the run if it is not there, else give it these limits.
-- KEYS     the run
-- ARGV     timeline, incarnation (nonces, used only for a new run), the limits in the order of LIMITS and WORDS (_run.lua)
-- Returns  the run's state, msgpack
-- Errors   HR_INVALID

local MAY_BE_0 = {max_age = true, ahead_steps = true, redundant = true, max_scored = true, retain_steps = true}
-- What a group may have beyond n: its trajectories are arguments of one command.
local MOST_REDUNDANT = 1024
local REDUNDANT
for i = 1, #LIMITS do if LIMITS[i] == 'redundant' then REDUNDANT = i end end
local POLICIES = {ordered = true, drop = true, mask = true}

local function limit_fields(args)
  if #args ~= 2 + #LIMITS + #WORDS then refuse('HR_INVALID', #args .. ' arguments, not ' .. 2 + #LIMITS + #WORDS) end
  local fields = {}
  for i, field in ipairs(LIMITS) do
    fields[#fields + 1] = field
    fields[#fields + 1] = MAY_BE_0[field] and natural(args[i + 2], field) or positive(args[i + 2], field)
  end
  if tonumber(args[2 + REDUNDANT]) > MOST_REDUNDANT then
    refuse('HR_INVALID', 'redundant is ' .. args[2 + REDUNDANT] .. ', more than ' .. MOST_REDUNDANT .. '; lower replay.redundant_generations')
  end
  local policy, filter = args[3 + #LIMITS], args[4 + #LIMITS]
  if filter ~= '' and not parse_filter(filter) then refuse('HR_INVALID', 'filter is ' .. show(filter)) end
  for _, value in ipairs({'staleness_policy', choice(policy, POLICIES, 'staleness policy'), 'filter', filter}) do
    fields[#fields + 1] = value
  end
  return fields
end

local function make_run(keys, args)
  local key = keys[1]
  if #keys ~= 1 or not string.find(key, '^hr:{[%w._-]+}$') then
    refuse('HR_INVALID', 'KEYS is not one run key hr:{<run id>}')
  end
  local timeline, incarnation = name(args[1], 'timeline'), name(args[2], 'incarnation')
  local fields = limit_fields(args)
  if redis.call('EXISTS', key) == 0 then
    redis.call('HSET', key, 'timeline', timeline, 'incarnation', incarnation, 'next_step', 0, 'committed', -1,
      'enqueued', -1, 'closed', 0, 'tickets', 0, 'pinned', 0, 'top', 0, 'evicted', 0, 'freed', 0, 'refill', 0, 'bytes', 0, 'due', 1e15)
    redis.call('RPUSH', key .. ':' .. incarnation .. ':timelines', timeline .. ' 0')
  end
  redis.call('HSET', key, unpack(fields))
end

redis.register_function('hr_open_run', function(keys, args)
  local ok, problem = pcall(make_run, keys, args)
  if not ok and problem.code then return redis.error_reply(problem.code .. ' ' .. problem.message) end
  if not ok then error(problem) end
  return respond(function(run)
    wake(run, 'work')
    event(run, 'opened')
    return cmsgpack.pack(run_state(run))
  end, nil, keys, args, false)
end)
