-- lease: a verified replica takes groups: first those whose lease was lost, then validation, then the lowest orders as admission and memory
-- allow. Suspects, whose replica died, go in cohorts to a replica that holds nothing, before anything else; it gets no more until it has
-- none again. If the lowest ticket is a suspect, one replica that holds others drains for it.
-- KEYS     the run
-- ARGV     replica, most (groups), number (of this call, higher than that of any before), nonce (tokens are made of it)
-- Returns  msgpack: timeline, incarnation, version, leases. Each of these has group (id), record (key), token, expires_in_s, attempt, ticket
--          (-1: validation), count (trajectories of the group); if it had a lease before, also missing (indices to generate) and
--          prefixes (of those that another replica has begun: index and payload key)
-- Errors   HR_NOT_VERIFIED: the replica is not HEALTHY on this timeline; HR_FENCED: it arrives late; HR_INVALID
--
-- The last call, delivered again, is answered as it was before, and grants nothing more; an earlier one is refused: nobody would hear of what
-- it was given.
--
-- Admission: with v the replica's version, P groups a step, R = P * next_step and O = groups open, scoring or ready, a lease is granted
-- iff R + O < (v + ahead + 1) * P. Under `ordered`, `ahead` is the age bound A: a group's place in line is its step, so that the step is
-- at most v + A and the age at most A (law 2) without dropping anything. Under `drop` and `mask` it is ahead_steps, at least A: groups are
-- trained as they get ready, and reserve.lua keeps law 2.
--
-- Until a refill is complete no training prompt is leased: those that are still missing come before those that are there (law 5).
--
-- A group whose lease was lost has its place in line and its bytes already, and keeps what its trajectories can still be trained with: those
-- (finished or not) that would break law 2 at the next step start over. It keeps its deadline too; a suspect's begins anew.
--
-- Memory: a lease counts its group's worst case until it is complete. Past the bound leases wait, unless nothing is held at all
-- (a single group over the bound must not stop the run). Payloads of steps that were trained but not committed go first.
--
-- Leasing stops at the first group whose environment is broken, in order (law 5): the others wait behind it. If that group may be its probe,
-- and admission has no room, it is granted all the same, with what comes before it in order: what fails there alone may be what the trainer
-- waits for, and then there would never be room. A group that gets over age by this is generated again (law 2).
-- uses: _args, _fields, _fleet, _group, _memory, _meter, _register, _run, _scoring

local function fits(run, worst)
  while true do
    local bytes = run.bytes + (run.bytes_delta or 0)
    if bytes <= 0 or bytes + worst <= run.max_bytes then return true end
    if not evict_trained_step(run) then return false end
  end
end

-- Trajectories to start, and the bytes they may take.
local function extent(run, group)
  local count = group.n + (group.lane == 'train' and run.redundant or 0)
  return count, math.ceil(group.worst * count / group.n)
end

local function lease_token(nonce, number, group)
  return nonce .. '-' .. number .. '/' .. group.id
end

-- The group is the replica's until its lease ends; returns in how many milliseconds that is.
local function hold_lease(run, group, replica, deadline)
  local ends = math.min(run.now + run.lease_ms, deadline)
  redis.call('ZADD', run.base .. 'leases', ends, group.id)
  redis.call('SADD', run.base .. 'h:' .. replica, group.id)
  due_at(run, ends)
  return ends - run.now
end

local function grant(run, group, replica, version, nonce, count, worst)
  local number, ticket = take_ticket(run), -1
  if group.lane == 'train' then
    ticket = number
    redis.call('ZADD', run.base .. 'line', ticket, group.id)
  end
  local token, deadline = lease_token(nonce, number, group), run.now + run.group_deadline_ms
  redis.call('HSET', group.key, 'state', 'open', 'token', token, 'replica', replica, 'attempt', group.attempt + 1,
    'ticket', ticket, 'deadline', deadline, 'held', worst, 'leased', run.now, 'version', version, 'count', count, 'dropped', 0, 'saves', 0)
  hold(run, group, worst)
  move(run, group.lane, 'queued', 'open')
  local ends_in = hold_lease(run, group, replica, deadline)
  return {
    group = group.id, record = run.base .. 'd:' .. group.record, token = token, expires_in_s = ends_in / 1000, attempt = group.attempt + 1,
    ticket = ticket, count = count,
  }
end

-- Whether tokens of these versions could not be trained at the next step.
local function outdated(run, oldest, newest)
  local age = run.next_step - (run.staleness_policy == 'mask' and newest or oldest)
  return age > run.max_age or newest > run.next_step
end

local function versions(value)
  local nonce, oldest, newest = string.match(value, '^(%S+) %d+ (%d+) (%d+)')
  return nonce, tonumber(oldest), tonumber(newest)
end

-- The pushed trajectories of `group` that can be trained stay, and no other.
local function sift_pushed(run, group)
  local keys, indices, rewards = {}, {}, 0
  local oldest, newest
  for i, value in ipairs(redis.call('HMGET', group.key, unpack(field_names_of(group, 'p')))) do
    if value then
      local nonce, first, last = versions(value)
      if outdated(run, first, last) then
        keys[#keys + 1], keys[#keys + 2] = run.base .. 'p:' .. nonce, run.base .. 's:' .. nonce
        indices[#indices + 1] = i - 1
        group.actual = group.actual - redis.call('STRLEN', run.base .. 'p:' .. nonce)
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

-- Indices that are to be generated, and for those of them that are begun: index, payload key.
local function missing(run, group)
  local indices, prefixes = {}, {}
  local values = redis.call('HMGET', group.key, unpack(field_names_of(group, 'pxq')))
  for index = 0, group.count - 1 do
    local saved = values[2 * group.count + index + 1]
    if not values[index + 1] and not values[group.count + index + 1] then indices[#indices + 1] = index end
    if saved then
      local nonce, oldest, newest = versions(saved)
      if group.lane == 'train' and outdated(run, oldest, newest) then
        forget_prefix(run, group, index)
      else
        prefixes[#prefixes + 1] = {index, run.base .. 'p:' .. nonce}
      end
    end
  end
  return indices, prefixes
end

-- The group goes on with `replica` under a new token; its place in line and its attempt are its own already.
local function go_on(run, id, replica, nonce, deadline)
  local group = load_group(run, id)
  deadline = deadline or group.deadline
  if group.lane == 'train' then sift_pushed(run, group) end
  local token = lease_token(nonce, take_ticket(run), group)
  local indices, prefixes = missing(run, group)
  redis.call('HSET', group.key, 'token', token, 'replica', replica, 'deadline', deadline)
  local ends_in = hold_lease(run, group, replica, deadline)
  return {
    group = id, record = run.base .. 'd:' .. group.record, token = token, expires_in_s = ends_in / 1000, attempt = group.attempt,
    ticket = group.ticket, count = group.count, missing = indices, prefixes = prefixes,
  }
end

-- Groups that a replica gave back, or whose lease lapsed, go on with this one.
local function hand_on(run, most, replica, nonce, leases)
  local ids = {}
  for _, id in ipairs(redis.call('ZRANGE', run.base .. 'orphans', 0, most - 1)) do
    if not lease_over(run, id) then ids[#ids + 1] = id end
  end
  for _, id in ipairs(ids) do leases[#leases + 1] = go_on(run, id, replica, nonce) end
  if #ids > 0 then redis.call('ZREM', run.base .. 'orphans', unpack(ids)) end
  return #ids
end

-- The next cohort: suspects in the order of their tickets, as many as each of them allows.
local function lease_cohort(run, most, replica, nonce, leases)
  local ids = {}
  for _, id in ipairs(redis.call('ZRANGE', run.base .. 'suspects', 0, most - 1)) do
    most = math.min(most, tonumber(redis.call('HGET', group_key(run, id), 'cohort')))
    if #ids >= most then break end
    ids[#ids + 1] = id
  end
  for _, id in ipairs(ids) do
    redis.call('HDEL', group_key(run, id), 'cohort')
    leases[#leases + 1] = go_on(run, id, replica, nonce, run.now + run.group_deadline_ms)
  end
  redis.call('ZREM', run.base .. 'suspects', unpack(ids))
  redis.call('HSET', run.base .. 'r:' .. replica, 'cohort', 1)
  redis.call('UNLINK', run.base .. 'drains')
end

-- Whether this replica, which holds groups, gets no more until it has none: the lowest ticket is a suspect, and no other replica drains.
local function drains(run, replica, suspect_id, ticket)
  if ticket >= 0 and redis.call('ZRANGE', run.base .. 'line', 0, 0)[1] ~= suspect_id then return false end
  local other = redis.call('GET', run.base .. 'drains')
  if other and other ~= replica then
    local state, timeline = unpack(redis.call('HMGET', run.base .. 'r:' .. other, 'state', 'timeline'))
    if state == 'HEALTHY' and timeline == run.timeline then return false end
  end
  redis.call('SET', run.base .. 'drains', replica)
  return true
end

-- Whether the replica is set apart: it holds suspects (`cohort`), has been given some by this call, or drains for them.
local function set_apart(run, most, replica, cohort, nonce, leases)
  local held = redis.call('EXISTS', run.base .. 'h:' .. replica) == 1
  if held and cohort then return true end
  local first, ticket = unpack(redis.call('ZRANGE', run.base .. 'suspects', 0, 0, 'WITHSCORES'))
  if first and held then return drains(run, replica, first, tonumber(ticket)) end
  if first then
    lease_cohort(run, most, replica, nonce, leases)
  elseif cohort then
    redis.call('HDEL', run.base .. 'r:' .. replica, 'cohort')
  end
  return first ~= nil
end

local QUEUED = {'state', 'lane', 'record', 'env', 'n', 'worst', 'attempt', 'held'}

local function lease_from(run, lane, most, replica, version, nonce, leases)
  local granted, any_broken = 0, redis.call('EXISTS', run.base .. 'broken') == 1
  for _, id in ipairs(most > 0 and redis.call('ZRANGE', queue_of(run, lane), 0, most - 1) or {}) do
    local group = load_group(run, id, QUEUED)
    local count, worst = extent(run, group)
    local env = any_broken and environment_of(run, group)
    if env and not may_generate(run, env) or not fits(run, worst) then break end
    if env then begin_probe(run, env, id) end
    granted = granted + 1
    leases[#leases + 1] = grant(run, group, replica, version, nonce, count, worst)
  end
  if granted > 0 then redis.call('ZREMRANGEBYRANK', queue_of(run, lane), 0, granted - 1) end
  return granted
end

-- Groups up to the one that is to be a broken environment's probe; 0 if none may be, or none is among the next.
local function room_for_probe(run)
  if redis.call('EXISTS', run.base .. 'broken') == 0 then return 0 end
  for place, id in ipairs(redis.call('ZRANGE', queue_of(run, 'train'), 0, BATCH - 1)) do
    local env = environment_of(run, load_group(run, id, QUEUED))
    if is_broken(run, env) then return may_generate(run, env) and place or 0 end
  end
  return 0
end

local function lease(run, call)
  local replica, most, nonce = call.replica, math.min(call.most, BATCH), call.nonce
  local state, version, timeline, cohort =
    unpack(redis.call('HMGET', run.base .. 'r:' .. replica, 'state', 'version', 'timeline', 'cohort'))
  if state ~= 'HEALTHY' or timeline ~= run.timeline then
    refuse('HR_NOT_VERIFIED', 'replica ' .. replica .. ' holds no verified weights of this timeline; it may not lease')
  end
  version = tonumber(version)
  local leases = {}
  if set_apart(run, most, replica, cohort, nonce, leases) then most = 0 end
  if most > 0 then most = most - hand_on(run, most, replica, nonce, leases) end
  most = most - lease_from(run, 'validation', most, replica, version, nonce, leases)
  local reserved = run.prompts_per_step * run.next_step
  local ahead = redis.call('ZCARD', run.base .. 'line') + run.pinned
  local steps = run.staleness_policy == 'ordered' and run.max_age or run.ahead_steps
  local room = (version + steps + 1) * run.prompts_per_step - reserved - ahead
  if room <= 0 then room = room_for_probe(run) end
  if run.refill == 1 then room = 0 end
  lease_from(run, 'train', math.min(most, room), replica, version, nonce, leases)
  return cmsgpack.pack({timeline = run.timeline, incarnation = run.incarnation, version = version, leases = leases})
end

register('lease', {replica = name, most = positive, number = positive, nonce = name}, function(run, call)
  local key = replica_key(run, call.replica)
  local newest, answer = unpack(redis.call('HMGET', key, 'leased', 'answer'))
  if call.number == tonumber(newest or 0) and answer ~= '' then return answer end
  if call.number <= tonumber(newest or 0) then refuse('HR_FENCED', 'lease ' .. call.number .. ' of replica ' .. call.replica .. ' was answered before') end
  if redis.call('EXISTS', key) == 1 then redis.call('HSET', key, 'leased', call.number, 'answer', '') end
  answer = lease(run, call)
  redis.call('HSET', key, 'answer', answer, 'together', redis.call('SCARD', run.base .. 'h:' .. call.replica))
  return answer
end, false, true)
