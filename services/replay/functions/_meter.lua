-- Meters: what trajectories of the train lane are like at each end they come to, so that people can see how what is trained differs from
-- what was generated.
--
-- Moments: generated (its group got its scores), filtered, trained (a checkpoint holds its step, or its payload went before there was
-- one), masked (trained with tokens over age), expired (over age before it was trained), failed (for good, by itself or with its
-- group), surplus (beyond the n of its group; what it was like is known of those that had come in). A trajectory that a rewind takes
-- back and that is trained again counts as trained once.
--
-- m:<moment> (of all incarnations) is a hash: `trajectories`; `tokens` (over age, of masked); and of each quantity (length in tokens,
-- reward, latency from lease to push in ms, age in steps) `<quantity>:n`, how many have it, `:sum`, `:squares` and its buckets, two an
-- octave: `:p<k>` counts values in (2^((k-1)/2), 2^(k/2)], `:n<k>` those in (-2^((k+1)/2), -2^(k/2)], `:z` those in (-2^-10, 0].
-- A call adds up what it meters and writes each moment once: two commands, however many trajectories.
-- uses: _fields

local FIRST_BUCKET, LAST_BUCKET = -20, 60

local function bucket(value)
  if value > 0 then
    local k = math.ceil(2 * math.log(value) / math.log(2) - 1e-9)
    return ':p' .. math.max(FIRST_BUCKET, math.min(k, LAST_BUCKET))
  end
  local k = value < 0 and math.floor(2 * math.log(-value) / math.log(2) + 1e-9) or FIRST_BUCKET - 1
  return k < FIRST_BUCKET and ':z' or ':n' .. math.min(k, LAST_BUCKET)
end

local function add(sums, field, value)
  sums[field] = (sums[field] or 0) + value
end

local function sums_of(run, moment)
  run.meters = run.meters or {}
  run.meters[moment] = run.meters[moment] or {}
  return run.meters[moment]
end

-- Values of a quantity are counted as they come, and added up once, by `add_up`: a call sees the same ones over and over.
local function measure(sums, quantity, value)
  local values = sums.values or {}
  sums.values = values
  local seen = values[quantity] or {}
  values[quantity] = seen
  seen[value] = (seen[value] or 0) + 1
end

local function add_up(sums)
  local values = sums.values or {}
  sums.values = nil
  for quantity, seen in pairs(values) do
    for value, times in pairs(seen) do
      add(sums, quantity .. ':n', times)
      add(sums, quantity .. ':sum', times * value)
      add(sums, quantity .. ':squares', times * value * value)
      add(sums, quantity .. bucket(value), times)
    end
  end
end

-- Trajectories of which nothing is known.
local function meter_count(run, moment, trajectories)
  add(sums_of(run, moment), 'trajectories', trajectories)
end

-- One trajectory: its `p<i>`, its reward if it has one, and the step its age is counted from. Its number is the caller's to `meter_count`.
local function meter_one(run, moment, pushed, reward, step)
  local sums = sums_of(run, moment)
  local length, oldest, latency = string.match(pushed, '^%S+ (%d+) (%d+) %d+ (%d+)$')
  measure(sums, 'length', tonumber(length))
  measure(sums, 'latency', tonumber(latency))
  measure(sums, 'age', math.max(0, step - tonumber(oldest)))
  if reward then measure(sums, 'reward', tonumber(reward)) end
end

-- Every trajectory that the group has, `least` only those with a token of that age; at `step`, or the next one if none is given. `known` is
-- what the group holds of `field_names_of(group, 'pr')`, where that was read before.
local function meter(run, moment, group, step, least, known)
  if group.lane ~= 'train' then return end
  local started = group.count or group.n
  local values = known or redis.call('HMGET', group.key, unpack(field_names_of(group, 'pr')))
  step = step or run.next_step
  for i = 1, started do
    local pushed = values[i]
    if pushed and (not least or step - tonumber(string.match(pushed, '^%S+ %d+ (%d+)')) >= least) then
      meter_count(run, moment, 1)
      meter_one(run, moment, pushed, values[started + i], step)
    end
  end
end

-- A group of a step that was trained, counted once however often it comes here.
local function meter_trained(run, group)
  if redis.call('HSETNX', group.key, 'metered', 1) == 0 then return end
  meter(run, 'trained', group, group.step)
  if run.staleness_policy == 'mask' then meter(run, 'masked', group, group.step, run.max_age + 1) end
end

local function flush_meters(run)
  for moment, sums in pairs(run.meters or {}) do
    add_up(sums)
    local key, fields, written = run.key .. ':m:' .. moment, {}, {}
    for field in pairs(sums) do fields[#fields + 1] = field end
    for i, value in ipairs(redis.call('HMGET', key, unpack(fields))) do
      written[2 * i - 1], written[2 * i] = fields[i], string.format('%.17g', tonumber(value or 0) + sums[fields[i]])
    end
    redis.call('HSET', key, unpack(written))
  end
end
