-- Dynamic sampling: a group whose trajectories have the same reward but for rounding teaches nothing: its advantages are rounding too.
--
-- The run's `filter` says what to compare: '' nothing; `<low> <high>` the rewards, clamped to these bounds; `<low> <high> components` each
-- of the reward components in the score records, clamped in the same way.
-- uses: _args, _fields, _run, _trajectory

local FILTERS = {[''] = true, ['components'] = true}

-- The bounds of a filter, and `components` or ''; nil if it is not a filter.
local function parse_filter(value)
  local low, high, compared = string.match(value, '^(%S+) (%S+) ?(%S*)$')
  if low and tonumber(low) and tonumber(high) and FILTERS[compared] then return tonumber(low), tonumber(high), compared end
end

LIMITS.filter = function(value, what)
  if text(value, what) ~= '' and not parse_filter(value) then refuse('HR_INVALID', 'filter is ' .. show(value)) end
  return value
end

-- A field of a score record, or nil if there is none of that type.
local function score_field(record, field, kind)
  local ok, score = pcall(cmsgpack.unpack, record)
  if ok and type(score) == 'table' and type(score[field]) == kind then return score[field] end
end

-- The values to compare of each of the group's scored trajectories, by name.
local function compared_of(run, group, compared)
  local rewards = redis.call('HMGET', group.key, unpack(field_names_of(group, 'r')))
  local pushed = redis.call('HMGET', group.key, unpack(field_names_of(group, 'p')))
  local found = {}
  for i, reward in ipairs(rewards) do
    if reward and compared == 'components' then
      local record = redis.call('GET', score_key(run, nonce_of(pushed[i])))
      found[#found + 1] = score_field(record, 'components', 'table')
    elseif reward then
      found[#found + 1] = {reward = tonumber(reward)}
    end
  end
  return found
end

-- ROUNDING in services/trainer/learning/algorithms/statistics.py: a difference of this share of the larger value, or less, is rounding.
-- Scaling maps the bounds to others, so of large numbers in narrow bounds a share of these counts.
local ROUNDING = 1e-6

local function same(one, other, low, high)
  for field, value in pairs(one) do
    local against = other[field]
    if not against then return false end
    local first, second = math.min(math.max(value, low), high), math.min(math.max(against, low), high)
    if math.abs(first - second) > ROUNDING * math.min(math.max(math.abs(first), math.abs(second)), high - low) then return false end
  end
  return true
end

-- A group whose scores have no components does not count as equal: it goes to the trainer, which reports what is missing.
local function all_equal(run, group)
  local low, high, compared = parse_filter(run.filter)
  local scores = compared_of(run, group, compared)
  if next(scores[1]) == nil then return false end
  for i = 2, #scores do
    if not same(scores[1], scores[i], low, high) or not same(scores[i], scores[1], low, high) then return false end
  end
  return true
end
