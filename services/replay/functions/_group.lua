-- Groups: their hash, and the changes of state that several transitions share.
--
-- Fields of g:<id>:
--   state, lane, order, n, step, reason
--   env       the environment that scores it
--   kind      `episodes`: runners lease it; `validators`: the replicas that validate beside training do; absent: any replica does
--   record    nonce of its record
--   worst     bytes that n trajectories may grow to; actual and held: bytes pushed, bytes accounted
--   attempt   leases so far; failures, ticket, token, replica; version (the oldest weights that the lease allows)
--   deadline  of an open group that is leased: when its lease ends unless it progresses (law 6); moved: when it progressed last (both in
--             ms); progress: the highest count that a heartbeat reported under this lease
--   pushed, scored; oldest and newest (weight versions)
--   count     trajectories that this attempt starts: n, and in the train lane the run's `redundant` beyond
--   dropped   those of them that failed for good
--   saves     how many unfinished trajectories are saved
--   cohort    of a suspect: the largest number of groups, itself included, that are leased together with it
--   build     `<number> <build>`: the environment's build that gave its scores, after the number of the newest take_scoring that led to one
--   rescored  how often another build's scores replaced them
--   rebuilt   of episodes: how often the group started over because another build scored
-- For each trajectory i:
--   p<i>, q<i>, w<i>, a<i>  see _trajectory.lua
--   f<i>      see _scoring.lua
--   r<i>      reward
--   x<i>      why it was dropped
--
-- A queued group that was passed over has its place in line and its bytes (_admission.lua).
--
-- The first n trajectories that are scored are the group (law 3). Which indices they have is left to chance, so readers go by p<i>.
-- uses: _args, _fields, _fleet, _meter, _run, _trajectory

limit('max_attempts', positive)
limit('group_deadline_ms', positive)
limit('max_episode_bytes', positive)  -- of an episode's calls, and of its record

local TEXTS = {'state', 'lane', 'record', 'env', 'kind', 'token', 'replica', 'reason'}
local WHOLES = {
  'order', 'n', 'worst', 'attempt', 'failures', 'ticket', 'deadline', 'pushed', 'scored', 'oldest', 'newest', 'held', 'step', 'lost',
  'count', 'dropped', 'actual', 'saves', 'moved',
}
local GROUP, IS_NUMBER = {}, {leased = true}
for i = 1, #TEXTS do GROUP[i] = TEXTS[i] end
for i = 1, #WHOLES do GROUP[#TEXTS + i], IS_NUMBER[WHOLES[i]] = WHOLES[i], true end

local function group_key(run, id)
  return run.base .. 'g:' .. id
end

-- The group as a table, or nil if the buffer does not know it. A field costs a microsecond, so a caller that handles hundreds of groups
-- names the `fields` that it needs. The first must be one that every group has.
local function load_group(run, id, fields)
  fields = fields or GROUP
  local key = group_key(run, id)
  local values = redis.call('HMGET', key, unpack(fields))
  if not values[1] then return nil end
  local group = {id = id, key = key}
  for i, field in ipairs(fields) do
    group[field] = IS_NUMBER[field] and tonumber(values[i] or nil) or values[i] or nil
  end
  return group
end

-- Whether the lease's time has passed although no call has ended it yet (see _due.lua).
local function lease_over(run, id)
  return run.backlog and tonumber(redis.call('ZSCORE', run.base .. 'leases', id)) <= run.now
end

-- The group of a call under a lease. Law 4: the token is the fence. A lease may outlive its timeline (rewind.lua).
local function leased_group(run, call)
  local id = call.group
  local group = load_group(run, id)
  require_incarnation(run, call.incarnation)
  if not group or group.token ~= call.token then require_timeline(run, call.timeline) end
  if not group or group.state ~= 'open' or group.token ~= call.token or lease_over(run, id) then
    refuse('HR_LEASE_LOST', 'the lease of group ' .. id .. ' is over')
  end
  return group
end

-- A key that exists separately for each kind of groups.
local function of_kind(run, place, kind)
  return run.base .. place .. (kind and ':' .. kind or '')
end

local function queue_of(run, lane, kind)
  return lane == 'train' and run.base .. 'queue' or of_kind(run, 'validation', kind)
end

-- It may be before all that is due: the run may have gone on with shorter limits.
local function lease_end(run, deadline)
  local ends = math.min(run.now + run.lease_ms, deadline)
  due_at(run, ends)
  return ends
end

-- Law 6: the group has progressed under its lease, so its deadline starts over and its lease is renewed. Returns when the lease ends.
-- `progress`: as a heartbeat reported it. What counts as progress is in docs/replay.md.
local function advance(run, key, progress)
  local deadline = run.now + run.group_deadline_ms
  redis.call('HSET', key, 'deadline', deadline, 'moved', run.now, unpack(progress and {'progress', progress} or {}))
  return lease_end(run, deadline)
end

-- The holder has handed in something new.
local function note_progress(run, group)
  redis.call('ZADD', run.base .. 'leases', advance(run, group.key), group.id)
end

-- Memory: `bytes` is the size of the payloads plus what leases may still add. If they become fewer, those wake up for whose groups there
-- was no room (`short`).
local function hold(run, group, bytes)
  local more = bytes - (group.held or 0)
  run.bytes_delta = (run.bytes_delta or 0) + more
  group.held = bytes
  if more < 0 and run.short == 1 then
    set(run, 'short', 0)
    wake(run, 'work')
  end
end

-- The keys that hold trajectories for the scorer, each as `<id>:<index>` (_scoring.lua).
local function place_of(run, place, env)
  return run.base .. place .. ':' .. env
end

local function split_member(member)
  return string.match(member, '^(.+):(%d+)$')
end

-- Keys of the payloads and scores of a group's pushed trajectories, and their indices.
local function payload_keys(run, group)
  local keys, indices = {}, {}
  for i, value in ipairs(redis.call('HMGET', group.key, unpack(field_names_of(group, 'p')))) do
    if value then
      local nonce = nonce_of(value)
      keys[#keys + 1] = payload_key(run, nonce)
      keys[#keys + 1] = score_key(run, nonce)
      indices[#indices + 1] = i - 1
    end
  end
  return keys, indices
end

-- Delete pushed trajectories: their payloads and scores (`keys`), and their places with the scorer.
local function take_out(run, group, keys, indices)
  if #indices == 0 then return end
  redis.call('UNLINK', unpack(keys))
  local members, fields = {}, {}
  for _, index in ipairs(indices) do
    members[#members + 1] = group.id .. ':' .. index
    fields[#fields + 1] = 'p' .. index
    fields[#fields + 1] = 'w' .. index
    fields[#fields + 1] = 'f' .. index
    fields[#fields + 1] = 'r' .. index
  end
  local env = group.env
  for _, place in ipairs({'unscored', 'alone', 'taken'}) do redis.call('ZREM', place_of(run, place, env), unpack(members)) end
  redis.call('HDEL', group.key, unpack(fields))
end

-- Delete the saved part of an unfinished trajectory.
local function forget_prefix(run, group, index)
  if (group.saves or 0) == 0 then return end
  local saved = redis.call('HGET', group.key, 'q' .. index)
  if not saved then return end
  redis.call('UNLINK', payload_key(run, nonce_of(saved)))
  redis.call('HDEL', group.key, 'q' .. index)
  group.saves = redis.call('HINCRBY', group.key, 'saves', -1)
end

local function forget_prefixes(run, group)
  if (group.saves or 0) == 0 then return end
  for i = 0, group.count - 1 do forget_prefix(run, group, i) end
end

-- Delete the trajectories of an attempt that failed, with their bytes.
local function discard(run, group)
  take_out(run, group, payload_keys(run, group))
  forget_prefixes(run, group)
  if (group.dropped or 0) > 0 then redis.call('HDEL', group.key, unpack(field_names_of(group, 'x'))) end
  if group.kind == 'episodes' then redis.call('HDEL', group.key, unpack(field_names_of(group, 'a'))) end
  hold(run, group, 0)
end

-- End the lease. Its token ends too, unless the group was completed.
local function end_lease(run, group)
  redis.call('ZREM', run.base .. 'leases', group.id)
  if group.replica == '' then
    redis.call('ZREM', of_kind(run, 'orphans', group.kind), group.id)
    if redis.call('ZREM', of_kind(run, 'suspects', group.kind), group.id) == 1 then redis.call('HDEL', group.key, 'cohort') end
  else
    redis.call('SREM', run.base .. 'h:' .. group.replica, group.id)
  end
end

-- Remove the group from the keys of its state. The caller removes groups of a reserved step from `steps`.
local function leave(run, group)
  if group.state == 'queued' then
    redis.call('ZREM', queue_of(run, group.lane, group.kind), group.id)
    redis.call('ZREM', of_kind(run, 'passed', group.kind), group.id)
  end
  if group.state == 'open' then end_lease(run, group) end
  if group.lane == 'train' then
    redis.call('ZREM', run.base .. 'line', group.id)
    redis.call('ZREM', run.base .. 'ready', group.id)
  end
end

-- Delete a group with everything that it holds.
local function erase(run, group)
  local keys = payload_keys(run, group)
  keys[#keys + 1] = run.base .. 'd:' .. group.record
  keys[#keys + 1] = group.key
  redis.call('UNLINK', unpack(keys))
  hold(run, group, 0)
end

-- Law 1: a train group that ended without being trained (failed, filtered) never comes back, even after its hash and record are deleted.
-- Its order stays in the bitmap `ended`, across rewinds and restores, and no refill takes it again. Only `retry` brings back a failed
-- group.
local function mark_ended(run, group)
  if group.lane == 'train' then redis.call('SETBIT', run.base .. 'ended', group.order, 1) end
end

-- The number of failed groups kept for people to look at. Of older ones only the order stays.
local DEAD_LETTERS = 1000

local function trim_dead_letters(run)
  local excess = redis.call('ZCARD', run.base .. 'failed') - DEAD_LETTERS
  for _, id in ipairs(excess > 0 and redis.call('ZRANGE', run.base .. 'failed', 0, excess - 1) or {}) do
    local group = load_group(run, id)
    -- a validation group is deleted with its lane
    if group.lane == 'train' then
      erase(run, group)
      redis.call('HDEL', run.base .. 'letters', group.order)
    end
    redis.call('ZREM', run.base .. 'failed', id)
  end
end

-- End the group as failed, and keep the reason: a dead letter. Law 7: nothing of it becomes a reward.
local function fail(run, group, reason)
  meter(run, 'failed', group)
  leave(run, group)
  discard(run, group)
  redis.call('HSET', group.key, 'state', 'failed', 'reason', words(reason), 'token', '', 'held', 0)
  mark_ended(run, group)
  if group.lane == 'train' then
    redis.call('SETBIT', run.base .. 'failures', group.order, 1)
    redis.call('HSET', run.base .. 'letters', group.order, group.id)
  end
  redis.call('ZADD', run.base .. 'failed', run.now, group.id)
  trim_dead_letters(run)
  move(run, group.lane, group.state, 'failed')
  tell(run, 'failed', group.id, {}, reason)
  event(run, 'failed', 'group', group.id, 'reason', words(reason))
  wake(run, 'ready')
  wake(run, 'work')
end

-- Put the group back into the queue, where its order places it before all groups that were never leased. Its trajectories are deleted and
-- its token is void. `cause` is metered. `counted` charges one of `max_attempts` (law 6: a poison group ends as failed).
local function requeue(run, group, cause, counted, reason)
  local failures = group.failures + (counted and 1 or 0)
  redis.call('HINCRBY', run.base .. 'requeues', cause, 1)
  if cause == 'over_age' then meter(run, 'expired', group) end
  if counted and failures >= run.max_attempts then
    redis.call('HSET', group.key, 'failures', failures)
    return fail(run, group, reason .. ' (attempt ' .. failures .. ' of ' .. run.max_attempts .. ')')
  end
  leave(run, group)
  discard(run, group)
  redis.call('HSET', group.key, 'state', 'queued', 'token', '', 'failures', failures, 'reason', words(reason),
    'held', 0, 'pushed', 0, 'scored', 0, 'actual', 0)
  redis.call('HDEL', group.key, 'oldest', 'newest', 'step', 'lost', 'count', 'dropped', 'metered', 'rescored')
  redis.call('ZADD', queue_of(run, group.lane, group.kind), group.order, group.id)
  move(run, group.lane, group.state, 'queued')
  tell(run, 'requeued', group.id, {'c', cause}, reason)
  event(run, 'requeued', 'group', group.id, 'cause', cause, 'reason', words(reason))
  wake(run, 'work')
  wake(run, 'ready')  -- those behind it in line may be the next batch
  return nil
end

-- The lease is lost, but not the attempt: the group keeps its place in line and everything that was pushed, scored or saved, until a
-- replica leases what is missing.
local function lose_lease(run, group, cause, reason)
  redis.call('HINCRBY', run.base .. 'requeues', cause, 1)
  end_lease(run, group)
  redis.call('HSET', group.key, 'token', '', 'replica', '', 'reason', words(reason))
  event(run, 'passed_on', 'group', group.id, 'cause', cause, 'reason', words(reason))
  tell(run, 'passed_on', group.id, {'c', cause}, reason)
  wake(run, 'work')
end

-- Let another replica continue the group. No attempt is charged, and no deadline runs until then.
local function pass_on(run, group, cause, reason)
  lose_lease(run, group, cause, reason)
  redis.call('ZADD', of_kind(run, 'orphans', group.kind), group.ticket, group.id)
end

-- A holder of groups, in words for people.
local function who(holder)
  local kind, id = told_apart(holder)
  return kind .. ' ' .. id
end

-- Groups that a replica held when it died are leased again in cohorts of this share of them. So the next two deaths find the poison group
-- among 64, and the others wait no longer than they must.
local COHORTS = 8

-- The group's holder died, or was silent on it, while it held `together` groups. Any of them may be the reason, so each is a suspect: it
-- waits to be leased apart from others, and no deadline runs meanwhile (law 6). Only a group that was alone with its holder is charged an
-- attempt. `what` the holder did, and the remedy if there is one.
local function suspect(run, group, together, cause, what, remedy)
  local reason = who(group.replica) .. ' ' .. what .. ' with ' .. (together == 1 and 'this group alone' or together .. ' groups') ..
    (remedy and '; ' .. remedy or '')
  if together == 1 then
    local failures = group.failures + 1
    if failures >= run.max_attempts then return requeue(run, group, cause, true, reason) end
    redis.call('HSET', group.key, 'failures', failures)
  end
  lose_lease(run, group, cause, reason)
  redis.call('HSET', group.key, 'cohort', math.max(1, math.floor(together / COHORTS)))
  redis.call('ZADD', of_kind(run, 'suspects', group.kind), group.ticket, group.id)
end

-- Nothing more will be generated in this attempt: the lease is done and its unused bytes are freed. The token stays, so that a repeated
-- push is recognized.
local function end_generation(run, group)
  end_lease(run, group)
  hold(run, group, group.actual)
  redis.call('HSET', group.key, 'state', 'scoring', 'held', group.actual)
  move(run, group.lane, 'open', 'scoring')
  tell(run, 'scoring', group.id)
  wake(run, 'scoring')  -- a scorer may hold trajectories until their group is complete
end

local function tell_dropped(run, group, index, reason)
  event(run, 'dropped', 'group', group.id, 'index', index, 'reason', words(reason))
  tell(run, 'dropped', group.id, {'i', index}, reason)
end

-- A trajectory will not be generated. Others were started beyond n, so the group does without it.
local function do_without(run, group, index, reason)
  note_progress(run, group)
  meter_count(run, 'failed', 1)
  forget_prefix(run, group, index)
  redis.call('HSET', group.key, 'x' .. index, words(reason), 'dropped', group.dropped + 1)
  tell_dropped(run, group, index, reason)
  if group.pushed + group.dropped + 1 == group.count then end_generation(run, group) end
end

-- A pushed trajectory has failed for good. The group fails too, unless others were started beyond n (law 7: a failure is never a reward).
local function drop(run, group, index, reason)
  if group.dropped >= group.count - group.n then return fail(run, group, reason) end
  local pushed = redis.call('HGET', group.key, 'p' .. index)
  local nonce = nonce_of(pushed)
  meter_count(run, 'failed', 1)
  meter_one(run, 'failed', pushed, nil, run.next_step)
  local payload = payload_key(run, nonce)
  group.actual = group.actual - redis.call('STRLEN', payload)
  take_out(run, group, {payload, score_key(run, nonce)}, {index})
  redis.call('HSET', group.key, 'x' .. index, words(reason), 'dropped', group.dropped + 1, 'pushed', group.pushed - 1,
    'actual', group.actual)
  if group.state == 'scoring' then
    hold(run, group, group.actual)
    redis.call('HSET', group.key, 'held', group.actual)
  end
  tell_dropped(run, group, index, reason)
  return nil
end

-- the ids of a step, one per line
local function lines(joined)
  local ids = {}
  for id in string.gmatch(joined or '', '[^\n]+') do ids[#ids + 1] = id end
  return ids
end
