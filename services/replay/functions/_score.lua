-- Scores from scorers (score.lua) and runners (finish.lua), and the effect of a group's last score.
-- uses: _args, _fields, _filter, _fleet, _group, _meter, _run, _trajectory

-- SCORE_BYTES in headrace/records/score.py: the bytes that leases reserve for a score.
local MOST_BYTES = 8192

-- BUILD_BYTES in headrace/records/score.py.
local MOST_BUILD_BYTES = 256

local STATUS = one_of({'SCORED', 'FAILED', 'TIMED_OUT', 'INVALID', 'INTERRUPTED', 'NOT_STARTED', 'UNSENDABLE'})

-- `entry` belongs to trajectory id:at. It gets the status, reward, build and message of the score in the call, and the score's record.
local function parse_score(run, entry, given, record)
  entry.status, entry.reward, entry.record = STATUS(given.status, 'status'), given.reward, record
  if #record > MOST_BYTES then
    refuse('HR_INVALID', 'the score record of ' .. entry.id .. ':' .. entry.at .. ' has ' .. #record .. ' bytes, more than ' .. MOST_BYTES)
  end
  if entry.status == 'SCORED' then
    finite(entry.reward, 'reward')
    entry.build = text(given.build, 'build')
    if #entry.build > MOST_BUILD_BYTES then
      refuse('HR_INVALID', 'build ' .. show(entry.build) .. ' has ' .. #entry.build .. ' bytes, more than ' .. MOST_BUILD_BYTES)
    end
    if select(3, parse_filter(run.filter)) == 'components' and not score_field(record, 'components', 'table') then
      refuse('HR_INVALID', 'the score record of ' .. entry.id .. ':' .. entry.at ..
        ' is invalid, and groups are filtered by its components')
    end
  else
    if entry.reward ~= nil or given.build ~= nil then
      refuse('HR_INVALID', 'status ' .. entry.status .. ' with reward ' .. show(entry.reward) .. ' and build ' .. show(given.build) ..
        '; only SCORED has them')
    end
    entry.message = score_field(record, 'message', 'string')
    if not entry.message then
      refuse('HR_INVALID', 'the score record of ' .. entry.id .. ':' .. entry.at .. ' does not say what went wrong')
    end
    text(entry.message, 'message')
    entry.traceback = text(score_field(record, 'traceback', 'string') or '', 'traceback')
  end
  return entry
end

-- `p<i>` and `r<i>` of all its trajectories, if the caller has collected them; else nil.
local function known_of(group)
  if group.count > group.n then return nil end  -- some are surplus
  local values = {}
  for i, field in ipairs(field_names_of(group, 'pr')) do
    if not group[field] then return nil end
    values[i] = group[field]
  end
  return values
end

-- End the group as filtered. Only its order stays.
local function filter(run, group)
  meter(run, 'filtered', group)
  leave(run, group)
  mark_ended(run, group)
  erase(run, group)
  move(run, group.lane, group.state, 'filtered')
  tell(run, 'filtered', group.id)
  redis.call('HINCRBY', run.base .. 'since', 'filtered', 1)
  wake(run, 'ready')
  wake(run, 'work')
end

-- Delete what was pushed beyond the n that are scored. It no longer counts.
local function drop_surplus(run, group)
  local keys, indices = {}, {}
  meter_count(run, 'surplus', group.count - group.n - group.dropped)
  local pushed = redis.call('HMGET', group.key, unpack(field_names_of(group, 'p')))
  local rewards = redis.call('HMGET', group.key, unpack(field_names_of(group, 'r')))
  group.oldest, group.newest = math.huge, 0
  for i, value in ipairs(pushed) do
    local nonce, _, oldest, newest = extent_of(value)
    if rewards[i] then
      group.oldest, group.newest = math.min(group.oldest, oldest), math.max(group.newest, newest)
    elseif nonce then
      meter_one(run, 'surplus', value, nil, run.next_step)
      keys[#keys + 1], indices[#indices + 1] = payload_key(run, nonce), i - 1
      group.actual = group.actual - redis.call('STRLEN', keys[#keys])
    end
  end
  take_out(run, group, keys, indices)
  hold(run, group, group.actual)
  redis.call('HSET', group.key, 'pushed', group.n, 'oldest', group.oldest, 'newest', group.newest, 'actual', group.actual,
    'held', group.actual)
end

local function all_scored(run, scored)
  -- if nothing is deleted, what the caller has read is enough
  local plain = scored.state == 'scoring' and scored.count == scored.n and run.filter == ''
  local group = plain and scored or load_group(run, scored.id)
  if group.state == 'open' then
    end_lease(run, group)
    forget_prefixes(run, group)
  end
  if group.count > group.n then drop_surplus(run, group) end
  local state = 'evaluated'
  if group.lane == 'train' then
    redis.call('HINCRBY', run.base .. 'since', 'scored', 1)
    meter(run, 'generated', group, nil, nil, known_of(scored))
    if run.filter ~= '' and all_equal(run, group) then return filter(run, group) end
    state = 'ready'
    redis.call('ZADD', run.base .. 'ready', group.ticket, group.id)
  end
  redis.call('HSET', group.key, 'state', state)
  move(run, group.lane, group.state, state)
  tell(run, state, group.id)
  wake(run, 'ready')
  if state == 'evaluated' and not validates(run) then wake(run, 'work') end  -- validators may train again
end
