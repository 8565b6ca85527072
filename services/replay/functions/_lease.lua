-- Leases, as replicas (lease.lua) and runners (lease_episodes.lua) take and keep them.
--
-- A `taker` is a member that takes groups: holder (its name in the registry), kind (of the groups that it takes), version, nonce, most
-- (groups that it may still get), slots (trajectories that it can still start, by lane; a group starts with everything that it misses, or
-- not at all), cohort (whether the groups that it holds, if any, are suspects), leases (what it got).
--
-- Order: first groups whose lease was lost, then validation, then the lowest orders that admission and memory allow. Suspects, whose holder
-- died, come before everything else. They go in cohorts to a taker that holds nothing, and it gets nothing more until it holds nothing
-- again. If the lowest ticket is a suspect, a taker that holds other groups drains for it.
--
-- Kinds: admission and memory count both kinds together, and both share the orders. So a lease looks at the first groups in the queue,
-- whatever their kind, as far as there is room. It passes over groups of the other kind: they take their place in line, their ticket and
-- their bytes, as if they had been leased, and come first when a taker of their kind takes groups. So the order does not depend on which
-- kind is faster (law 5), and no group behind them takes the room that they need.
--
-- Admission: with v the taker's version, P groups per step, R = P * next_step and O = groups before in line, a lease is granted iff R + O <
-- (v + ahead + 1) * P. Under `ordered`, `ahead` is the age bound A: a group's place in line is its step, so that the step is at most v + A
-- and the age at most A (law 2) without dropping anything. Under `drop` and `mask`, `ahead` is ahead_steps, at least A: groups are trained
-- as they become ready, and reserve.lua enforces law 2.
--
-- Shares: a replica that got less than it asked for waits. While others wait, a replica gets at most its share: what can be leased now, plus
-- what it and the waiting replicas already hold, divided equally among them. Otherwise the first to ask would take everything that admission
-- allows, and the others would generate nothing.
--
-- Until a refill is complete, no training prompt is leased: the missing prompts come before those in the queue (law 5).
--
-- A group whose lease was lost already has its place in line and its bytes. It keeps the trajectories (finished or not) that can still be
-- trained. Those that would break law 2 at the next step start over, and so do unfinished episodes. The group also keeps its deadline,
-- unless it is a suspect: then the deadline starts over.
--
-- Memory: a lease counts its group's worst case until the group is complete. Beyond the limit leases wait, unless nothing is held at all (a
-- single group over the limit must not stop the run). Payloads of steps that were trained but not committed are dropped first.
--
-- Leasing stops at the first group in order whose environment is broken (law 5); the others wait behind it. If that group may be the
-- environment's probe and admission has no room, it is granted anyway, with everything before it in order. Otherwise there might never be
-- room: the trainer may be waiting for trajectories that alone make the environment fail. A group that gets over age by this is generated
-- again (law 2).
-- uses: _args, _fields, _fleet, _group, _memory, _meter, _register, _run, _scoring, _trajectory

local function fits(run, worst)
  while true do
    local bytes = run.bytes + (run.bytes_delta or 0)
    if bytes <= 0 or bytes + worst <= run.max_bytes then return true end
    if not evict_trained_step(run) then return false end
  end
end

-- The trajectories to start, and the bytes that they may take. For an episode these are its calls and then its whole record.
local function extent(run, group)
  local count = group.n + (group.lane == 'train' and run.redundant or 0)
  if group.kind == 'episodes' then return count, 2 * count * max_episode_bytes(run) end
  return count, math.ceil(group.worst * count / group.n)
end

local function lease_token(nonce, number, group)
  return nonce .. '-' .. number .. '/' .. group.id
end

-- Give the group to the taker until its lease ends. Returns in how many milliseconds that is.
local function hold_lease(run, group, taker, deadline)
  local ends = math.min(run.now + run.lease_ms, deadline)
  redis.call('ZADD', run.base .. 'leases', ends, group.id)
  redis.call('SADD', run.base .. 'h:' .. taker.holder, group.id)
  due_at(run, ends)
  return ends - run.now
end

-- Whether the taker has room for this many trajectories of one group. If not, it gets nothing more of that lane: a wide group must not
-- starve.
local function has_slots(taker, lane, count)
  if count <= taker.slots[lane] then return true end
  taker.slots[lane] = 0
  return false
end

local function give(taker, lease, lane, count)
  taker.leases[#taker.leases + 1] = lease
  taker.most, taker.slots[lane] = taker.most - 1, taker.slots[lane] - count
end

-- Lease a queued group. `ticket`: its place in line, if it has one.
local function grant(run, group, taker, count, worst, ticket)
  local number = take_ticket(run)
  if group.lane ~= 'train' then
    ticket = -1
  elseif not ticket then
    ticket = number
    redis.call('ZADD', run.base .. 'line', ticket, group.id)
  end
  local token, deadline = lease_token(taker.nonce, number, group), run.now + run.group_deadline_ms
  redis.call('HSET', group.key, 'state', 'open', 'token', token, 'replica', taker.holder, 'attempt', group.attempt + 1,
    'ticket', ticket, 'deadline', deadline, 'held', worst, 'leased', run.now, 'version', taker.version, 'count', count, 'dropped', 0,
    'saves', 0)
  hold(run, group, worst)
  move(run, group.lane, 'queued', 'open')
  local ends_in = hold_lease(run, group, taker, deadline)
  give(taker, {
    group = group.id, record = run.base .. 'd:' .. group.record, token = token, expires_in_s = ends_in / 1000, attempt = group.attempt + 1,
    ticket = ticket, count = count,
  }, group.lane, count)
end

-- Give a queued group of the other kind its place in line and its bytes.
local function pass_over(run, group, worst)
  local ticket = take_ticket(run)
  redis.call('ZADD', run.base .. 'line', ticket, group.id)
  redis.call('ZADD', of_kind(run, 'passed', group.kind), ticket, group.id)
  redis.call('HSET', group.key, 'held', worst)
  hold(run, group, worst)
end

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
local function go_on(run, group, taker, deadline)
  deadline = deadline or group.deadline
  if group.lane == 'train' then sift_pushed(run, group) end
  local token = lease_token(taker.nonce, take_ticket(run), group)
  local indices, prefixes = missing(run, group)
  redis.call('HSET', group.key, 'token', token, 'replica', taker.holder, 'deadline', deadline)
  local ends_in = hold_lease(run, group, taker, deadline)
  give(taker, {
    group = group.id, record = run.base .. 'd:' .. group.record, token = token, expires_in_s = ends_in / 1000, attempt = group.attempt,
    ticket = group.ticket, count = group.count, missing = indices, prefixes = prefixes, tries = group.kind and begun_before(group) or {},
  }, group.lane, #indices)
end

-- Whether the taker can start what the group misses. A replica can start anything.
local function can_start(run, taker, group)
  return not taker.kind or taker.slots[group.lane] > 0 and has_slots(taker, group.lane, misses(run, group))
end

-- Continue groups that were given back, or whose lease expired, with this taker.
local function hand_on(run, taker)
  local orphans, ids = of_kind(run, 'orphans', taker.kind), {}
  for _, id in ipairs(redis.call('ZRANGE', orphans, 0, taker.most - 1)) do
    if not lease_over(run, id) then
      local group = load_group(run, id)
      if can_start(run, taker, group) then
        go_on(run, group, taker)
        ids[#ids + 1] = id
      end
    end
  end
  if #ids > 0 then redis.call('ZREM', orphans, unpack(ids)) end
end

-- The next cohort: suspects in ticket order, as many as each of them allows.
local function lease_cohort(run, taker)
  local suspects, ids, most = of_kind(run, 'suspects', taker.kind), {}, taker.most
  for _, id in ipairs(redis.call('ZRANGE', suspects, 0, most - 1)) do
    local group = load_group(run, id)
    most = math.min(most, tonumber(redis.call('HGET', group.key, 'cohort')))
    if #ids >= most or not can_start(run, taker, group) then break end
    redis.call('HDEL', group.key, 'cohort')
    go_on(run, group, taker, run.now + run.group_deadline_ms)
    ids[#ids + 1] = id
  end
  if #ids == 0 then return end
  redis.call('ZREM', suspects, unpack(ids))
  redis.call('HSET', replica_key(run, taker.holder), 'cohort', 1)
  redis.call('UNLINK', of_kind(run, 'drains', taker.kind))
end

-- Whether a member may lease: a replica must be HEALTHY on this timeline, a runner ALIVE.
local function may_lease(run, holder)
  local state, timeline = unpack(redis.call('HMGET', replica_key(run, holder), 'state', 'timeline'))
  return state == 'ALIVE' or state == 'HEALTHY' and timeline == run.timeline
end

-- Whether this taker, which holds groups, gets no more until it has none. True if the lowest ticket is a suspect and no other taker drains.
local function drains(run, taker, suspect_id, ticket)
  if ticket >= 0 and redis.call('ZRANGE', run.base .. 'line', 0, 0)[1] ~= suspect_id then return false end
  local key = of_kind(run, 'drains', taker.kind)
  local other = redis.call('GET', key)
  if other and other ~= taker.holder and may_lease(run, other) then return false end
  redis.call('SET', key, taker.holder)
  return true
end

-- Whether the taker is reserved for suspects: it holds some, got some in this call, or drains for them.
local function set_apart(run, taker)
  local held = redis.call('EXISTS', run.base .. 'h:' .. taker.holder) == 1
  if held and taker.cohort then return true end
  local first, ticket = unpack(redis.call('ZRANGE', of_kind(run, 'suspects', taker.kind), 0, 0, 'WITHSCORES'))
  if first and held then return drains(run, taker, first, tonumber(ticket)) end
  if first then
    lease_cohort(run, taker)
  elseif taker.cohort then
    redis.call('HDEL', replica_key(run, taker.holder), 'cohort')
  end
  return first ~= nil
end

local QUEUED = {'state', 'lane', 'record', 'env', 'kind', 'n', 'worst', 'attempt', 'held'}

-- Whether a queued group of the taker's kind may be leased. If its environment is broken, it becomes the probe. `worst`: bytes that it does
-- not have yet.
local function may_begin(run, taker, group, count, worst)
  local env = taker.any_broken and environment_of(run, group)
  if env and not may_generate(run, env) or not has_slots(taker, group.lane, count) or worst and not fits(run, worst) then return false end
  if env then begin_probe(run, env, group.id) end
  return true
end

-- Lease groups that were passed over, as far as `bound` places in line are admitted. Returns whether none is left.
local function lease_passed(run, taker, bound)
  local passed = of_kind(run, 'passed', taker.kind)
  local found = redis.call('ZRANGE', passed, 0, taker.most - 1, 'WITHSCORES')
  for i = 1, #found, 2 do
    local group = load_group(run, found[i], QUEUED)
    local count, worst = extent(run, group)
    if redis.call('ZRANK', run.base .. 'line', group.id) >= bound or not may_begin(run, taker, group, count, nil) then
      return false
    end
    redis.call('ZREM', passed, group.id)
    grant(run, group, taker, count, worst, tonumber(found[i + 1]))
  end
  return taker.most > 0
end

-- Handle the first `room` groups of a queue: lease those of the taker's kind, pass over the others.
local function lease_from(run, lane, taker, room)
  local queue, seen = queue_of(run, lane, taker.kind), 0
  room = math.min(room, BATCH)
  local function take(group)
    local count, worst = extent(run, group)
    if group.kind ~= taker.kind then
      if taker.any_broken and is_broken(run, environment_of(run, group)) or not fits(run, worst) then return false end
      pass_over(run, group, worst)
    else
      if not may_begin(run, taker, group, count, worst) then return false end
      grant(run, group, taker, count, worst)
    end
    seen = seen + 1
    return true
  end
  local goes_on = true
  while goes_on and taker.most > 0 and seen < room do
    local ids = redis.call('ZRANGE', queue, seen, math.min(seen + taker.most, room) - 1)
    goes_on = #ids > 0
    for _, id in ipairs(ids) do
      goes_on = goes_on and take(load_group(run, id, QUEUED))
      if not goes_on then break end
    end
  end
  if seen > 0 then redis.call('ZREMRANGEBYRANK', queue, 0, seen - 1) end
end

-- The number of groups up to the one that will be a broken environment's probe. 0 if there can't be one, or none of the next is of the
-- taker's kind.
local function room_for_probe(run, taker)
  if not taker.any_broken then return 0 end
  for place, id in ipairs(redis.call('ZRANGE', queue_of(run, 'train'), 0, BATCH - 1)) do
    local group = load_group(run, id, QUEUED)
    local env = environment_of(run, group)
    if is_broken(run, env) then return group.kind == taker.kind and may_generate(run, env) and place or 0 end
  end
  return 0
end

-- The most groups that this replica may get, so that waiting replicas get as many. `room`: train groups that admission allows.
local function share_of(run, taker, room)
  local mine = redis.call('SCARD', run.base .. 'h:' .. taker.holder)
  local waiting, held = 0, mine
  for _, id in ipairs(redis.call('ZRANGE', registry_of(run, taker.holder), 0, -1)) do
    if id ~= taker.holder and redis.call('HGET', replica_key(run, id), 'waits') == '1' and may_lease(run, id) then
      waiting, held = waiting + 1, held + redis.call('SCARD', run.base .. 'h:' .. id)
    end
  end
  if waiting == 0 then return taker.most end
  local there = math.min(math.max(room, 0), redis.call('ZCARD', queue_of(run, 'train')))
  for _, key in ipairs({of_kind(run, 'orphans'), queue_of(run, 'validation'), of_kind(run, 'passed')}) do there = there + redis.call('ZCARD', key) end
  -- at least one, for a broken environment's probe: the replica that holds the fewest can always take it
  local share = math.ceil((math.max(there, 1) + held) / (waiting + 1))
  return math.min(taker.most, math.max(0, share - mine))
end

-- The taker's leases, in the form of a reply.
local function lease_to(run, taker)
  local steps = run.staleness_policy == 'ordered' and run.max_age or run.ahead_steps
  local bound = (taker.version + steps + 1 - run.next_step) * run.prompts_per_step - run.pinned
  local asked, apart = taker.most, set_apart(run, taker)
  if apart then
    taker.most = 0
  elseif not taker.kind then
    taker.most = share_of(run, taker, run.refill == 0 and bound - redis.call('ZCARD', run.base .. 'line') or 0)
  end
  if taker.most > 0 then hand_on(run, taker) end
  -- most groups have neither
  local any = taker.most > 0 and redis.call('EXISTS', run.base .. 'broken', of_kind(run, 'passed', taker.kind)) > 0
  taker.any_broken = any and redis.call('EXISTS', run.base .. 'broken') == 1
  if taker.most > 0 then lease_from(run, 'validation', taker, math.huge) end
  if taker.most > 0 and run.refill == 0 and (not any or lease_passed(run, taker, bound)) then
    local room = bound - redis.call('ZCARD', run.base .. 'line')
    lease_from(run, 'train', taker, room > 0 and room or room_for_probe(run, taker))
  end
  if not taker.kind then redis.call('HSET', replica_key(run, taker.holder), 'waits', not apart and #taker.leases < asked and 1 or 0) end
  return {timeline = run.timeline, incarnation = run.incarnation, version = taker.version, leases = taker.leases}
end

-- A repeat of a member's newest call gets the same answer, and grants nothing more. An earlier call is refused, because nobody would
-- receive what it is granted. `lease` answers a new call.
local function answer_lease(run, call, holder, lease)
  local key = replica_key(run, holder)
  local newest, answer = unpack(redis.call('HMGET', key, 'leased', 'answer'))
  if call.number == tonumber(newest or 0) and answer ~= '' then return answer end
  if call.number <= tonumber(newest or 0) then refuse('HR_FENCED', 'lease ' .. call.number .. ' of ' .. who(holder) .. ' was answered before') end
  if redis.call('EXISTS', key) == 1 then redis.call('HSET', key, 'leased', call.number, 'answer', '') end
  answer = cmsgpack.pack(lease())
  redis.call('HSET', key, 'answer', answer, 'together', redis.call('SCARD', run.base .. 'h:' .. holder))
  return answer
end

-- A heartbeat renews a lease up to its group's deadline. Returns nothing if it did, else `lost` or `complete`. With `complete`, the group
-- is complete and what is still being generated under the lease is surplus.
local function renew(run, holder, token, renewed)
  local group = string.match(token, '^[^/]+/(.+)$')
  local state, current, deadline, replica, n, count =
    unpack(redis.call('HMGET', group_key(run, group or ''), 'state', 'token', 'deadline', 'replica', 'n', 'count'))
  if current ~= token then return 'lost' end
  if state ~= 'open' or replica ~= holder then return state ~= 'scoring' and n ~= count and 'complete' or nil end
  if lease_over(run, group) then return 'lost' end
  renewed[#renewed + 1] = math.min(run.now + run.lease_ms, tonumber(deadline))
  renewed[#renewed + 1] = group
end

-- Keep the member alive, and the leases that its heartbeat `renewed`.
local function live_on(run, holder, number, renewed)
  if #renewed > 0 then redis.call('ZADD', run.base .. 'leases', unpack(renewed)) end
  see(run, holder, 'heartbeat', number, 'together', redis.call('SCARD', run.base .. 'h:' .. holder))
end

