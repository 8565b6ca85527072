-- Which queued groups a taker may begin: admission, memory, kinds and broken environments.
--
-- Admission: with v the taker's version, P groups per step, R = P * next_step and O = groups before in line, a lease is granted iff R + O <
-- (v + ahead + 1) * P. Under `ordered`, `ahead` is the age bound A: a group's place in line is its step, so that the step is at most v + A
-- and the age at most A (law 2) without dropping anything. Under `drop` and `mask`, `ahead` is ahead_steps, at least A: groups are trained
-- as they become ready, and reserve.lua enforces law 2.
--
-- Memory: a lease counts its group's worst case until the group is complete. Beyond the limit leases wait, unless nothing is held at all (a
-- single group over the limit must not stop the run). Payloads of steps that were trained but not committed are dropped first.
--
-- Kinds: admission and memory count both kinds together, and both share the orders. So a lease looks at the first groups in the queue,
-- whatever their kind, as far as there is room. It passes over groups of the other kind: they take their place in line, their ticket and
-- their bytes, as if they had been leased, and come first when a taker of their kind takes groups. So the order does not depend on which
-- kind is faster (law 5), and no group behind them takes the room that they need.
--
-- Leasing stops at the first group in order whose environment is broken (law 5); the others wait behind it. If that group may be the
-- environment's probe and admission has no room, it is granted anyway, with everything before it in order. Otherwise there might never be
-- room: the trainer may be waiting for trajectories that alone make the environment fail. A group that gets over age by this is generated
-- again (law 2).
-- uses: _args, _group, _memory, _run, _scoring, _taker

-- The most trajectories that a group may have beyond n. All of them are arguments of one command.
local MOST_REDUNDANT = 1024

limit('max_bytes', positive)
limit('redundant', function(value, what)
  if natural(value, what) > MOST_REDUNDANT then
    refuse('HR_INVALID', 'redundant is ' .. value .. ', more than ' .. MOST_REDUNDANT .. '; lower replay.redundant_generations')
  end
  return value
end)

local function fits(run, worst)
  while true do
    local bytes = run.bytes + (run.bytes_delta or 0)
    if bytes <= 0 or bytes + worst <= run.max_bytes then return true end
    if not evict_trained_step(run) then
      if run.short ~= 1 then set(run, 'short', 1) end
      return false
    end
  end
end

-- The trajectories to start, and the bytes that they may take. For an episode these are its calls and then its whole record.
local function needs(run, group)
  local count = group.n + (group.lane == 'train' and run.redundant or 0)
  if group.kind == 'episodes' then return count, 2 * count * run.max_episode_bytes end
  return count, math.ceil(group.worst * count / group.n)
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
  local token, version = lease_token(taker.nonce, number, group), version_for(taker, group)
  redis.call('HSET', group.key, 'state', 'open', 'token', token, 'replica', taker.holder, 'attempt', group.attempt + 1,
    'ticket', ticket, 'held', worst, 'leased', run.now, 'version', version, 'count', count, 'dropped', 0,
    'saves', 0)
  hold(run, group, worst)
  move(run, group.lane, 'queued', 'open')
  tell(run, 'leased', group.id, {'r', taker.holder, 'a', group.attempt + 1, 'v', version})
  local ends_in = hold_lease(run, group, taker)
  give(taker, {
    group = group.id, record = run.base .. 'd:' .. group.record, token = token, expires_in_s = ends_in / 1000, attempt = group.attempt + 1,
    ticket = ticket, version = version, count = count,
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

local QUEUED = {'state', 'lane', 'record', 'env', 'kind', 'n', 'worst', 'attempt', 'held'}

-- Whether a queued group of the taker's kind may be leased. If its environment is broken, it becomes the probe. `worst`: bytes that it does
-- not have yet.
local function may_begin(run, taker, group, count, worst)
  if not may_write(run, taker, group) then return false end
  local env = taker.any_broken and group.env
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
    local count, worst = needs(run, group)
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
    local count, worst = needs(run, group)
    if group.kind ~= taker.kind then
      if taker.any_broken and is_broken(run, group.env) or not fits(run, worst) then return false end
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
    local env = group.env
    if is_broken(run, env) then return group.kind == taker.kind and may_generate(run, env) and place or 0 end
  end
  return 0
end
