-- Groups that had a lease before: a taker continues them under a new token.
--
-- Such a group already has its place in line and its bytes. It keeps the trajectories (finished or not) that can still be trained. Those
-- that would break law 2 at the next step start over, and so do unfinished episodes. Its deadline starts over (law 6).
-- uses: _fields, _group, _meter, _run, _taker, _trajectory

-- Whether tokens of these versions could not be trained at the next step.
local function outdated(run, oldest, newest)
  local age = run.next_step - (run.staleness_policy == 'mask' and newest or oldest)
  return age > run.max_age or newest > run.next_step
end

-- Keep only the pushed trajectories of `group` that can be trained.
local function sift_pushed(run, group)
  local keys, indices, rewards = {}, {}, 0
  local oldest, newest
  for i, value in ipairs(redis.call('HMGET', group.key, unpack(field_names_of(group, 'p')))) do
    if value then
      local nonce, _, first, last = extent_of(value)
      if outdated(run, first, last) then
        keys[#keys + 1], keys[#keys + 2] = payload_key(run, nonce), score_key(run, nonce)
        indices[#indices + 1] = i - 1
        group.actual = group.actual - redis.call('STRLEN', payload_key(run, nonce))
        if last <= run.next_step then
          meter_count(run, 'expired', 1)
          meter_one(run, 'expired', value, redis.call('HGET', group.key, 'r' .. i - 1) or nil, run.next_step)
        end
        rewards = rewards + redis.call('HEXISTS', group.key, 'r' .. i - 1)
      else
        oldest, newest = math.min(oldest or first, first), math.max(newest or last, last)
      end
    end
  end
  if #indices == 0 then return end
  take_out(run, group, keys, indices)
  redis.call('HSET', group.key, 'pushed', group.pushed - #indices, 'scored', group.scored - rewards, 'actual', group.actual)
  if oldest then
    redis.call('HSET', group.key, 'oldest', oldest, 'newest', newest)
  else
    redis.call('HDEL', group.key, 'oldest', 'newest')
  end
end

-- The number of trajectories that an orphan or suspect misses when it continues.
local function misses(run, group)
  local values = redis.call('HMGET', group.key, unpack(field_names_of(group, 'px')))
  local count = 0
  for i = 1, group.count do
    local pushed, dropped = values[i], values[group.count + i]
    local _, _, oldest, newest = extent_of(pushed)
    local gone = pushed and group.lane == 'train' and outdated(run, oldest, newest)
    if not dropped and (not pushed or gone) then count = count + 1 end
  end
  return count
end

-- The indices to generate, and for those that are begun: index, payload key.
local function missing(run, group)
  local indices, prefixes = {}, {}
  local values = redis.call('HMGET', group.key, unpack(field_names_of(group, 'pxq')))
  for index = 0, group.count - 1 do
    local saved = values[2 * group.count + index + 1]
    if not values[index + 1] and not values[group.count + index + 1] then indices[#indices + 1] = index end
    if saved then
      local nonce, _, oldest, newest = extent_of(saved)
      if group.kind == 'episodes' or group.lane == 'train' and outdated(run, oldest, newest) then
        forget_prefix(run, group, index)
      else
        prefixes[#prefixes + 1] = {index, payload_key(run, nonce)}
      end
    end
  end
  return indices, prefixes
end

-- How often each of these episodes was begun before: index, number of times.
local function begun_before(group)
  local tries = {}
  for i, value in ipairs(redis.call('HMGET', group.key, unpack(field_names_of(group, 'a')))) do
    if value then tries[#tries + 1] = {i - 1, (tries_of(value))} end
  end
  return tries
end

-- Continue the group with the taker under a new token. It already has its place in line and its attempt.
local function go_on(run, group, taker)
  if group.lane == 'train' then sift_pushed(run, group) end
  local token, version = lease_token(taker.nonce, take_ticket(run), group), version_for(taker, group)
  local indices, prefixes = missing(run, group)
  redis.call('HSET', group.key, 'token', token, 'replica', taker.holder, 'version', version)
  local ends_in = hold_lease(run, group, taker)
  give(taker, {
    group = group.id, record = run.base .. 'd:' .. group.record, token = token, expires_in_s = ends_in / 1000, attempt = group.attempt,
    ticket = group.ticket, version = version, count = group.count, missing = indices, prefixes = prefixes,
    tries = group.kind == 'episodes' and begun_before(group) or {},
  }, group.lane, #indices)
end

-- Whether the taker can start what the group misses. A replica can start any number.
local function can_start(run, taker, group)
  if not may_write(run, taker, group) then return false end
  return taker.kind ~= 'episodes' or taker.slots[group.lane] > 0 and has_slots(taker, group.lane, misses(run, group))
end

-- Continue groups that were given back, or whose lease expired, with this taker.
local function hand_on(run, taker)
  local orphans, ids = of_kind(run, 'orphans', taker.kind), {}
  for _, id in ipairs(redis.call('ZRANGE', orphans, 0, taker.most - 1)) do
    local group = load_group(run, id)
    if can_start(run, taker, group) then
      go_on(run, group, taker)
      ids[#ids + 1] = id
    end
  end
  if #ids > 0 then redis.call('ZREM', orphans, unpack(ids)) end
end
