-- Meters: statistics of train trajectories at each possible outcome, so that people can see how the trained ones differ from the generated
-- ones.
--
-- Moments: generated (its group got its scores), filtered, trained (a checkpoint contains its step, or its payload was dropped before one
-- did), masked (trained with tokens over age), expired (over age before it was trained), failed (for good, alone or with its group),
-- surplus (beyond the n of its group; only those that had been pushed have values). A trajectory that a rewind takes back and that is
-- trained again counts as trained once.
--
-- m:<moment> (across all incarnations) is a hash: `trajectories`; `tokens` (for masked: those over age); and for each quantity (length in
-- tokens, reward, latency from lease to push in ms, age in steps) `<quantity>:n` (how many have it), `:sum`, `:squares` and its buckets,
-- two per octave: `:p<k>` counts values in (2^((k-1)/2), 2^(k/2)], `:n<k>` values in (-2^((k+1)/2), -2^(k/2)], `:z` values in (-2^-10, 0].
-- A call adds up what it meters and writes each moment once: two commands for any number of trajectories.
-- uses: _fields, _trajectory

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

-- Values of a quantity are counted as they come and added up once, by `add_up`, because a call sees the same values over and over.
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

-- Count trajectories (or `what`) without any known values.
local function meter_count(run, moment, count, what)
  add(sums_of(run, moment), what or 'trajectories', count)
end

-- Meter one trajectory: its `p<i>`, its reward if it has one, and the step from which its age counts. The caller counts it with
-- `meter_count`.
local function meter_one(run, moment, pushed, reward, step)
  local sums = sums_of(run, moment)
  local _, length, oldest = extent_of(pushed)
  measure(sums, 'length', length)
  measure(sums, 'latency', latency_of(pushed))
  measure(sums, 'age', math.max(0, step - oldest))
  if reward then measure(sums, 'reward', tonumber(reward)) end
end

-- Meter every trajectory of the group, or with `least` only those with a token of that age, at `step` (by default the next one). `known`
-- are the group's values for `field_names_of(group, 'pr')`, if they have been read already.
local function meter(run, moment, group, step, least, known)
  if group.lane ~= 'train' then return end
  local started = group.count or group.n
  local values = known or redis.call('HMGET', group.key, unpack(field_names_of(group, 'pr')))
  step = step or run.next_step
  for i = 1, started do
    local pushed = values[i]
    local _, _, oldest = extent_of(pushed)
    if pushed and (not least or step - oldest >= least) then
      meter_count(run, moment, 1)
      meter_one(run, moment, pushed, values[started + i], step)
    end
  end
end

-- Meter a group of a trained step. It counts once, however often this is called.
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
