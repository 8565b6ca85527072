-- Membership epochs of the weight channel: announced -> transfer -> done or aborted; `verify` is the only way to HEALTHY.
--
-- epoch    hash: id, version, timeline, state, rendezvous (msgpack)
-- members  hash: replica -> asked | acknowledged | verified | refused <why> | interrupted <why> (not its fault) | left out
--
-- From `transfer` on every replica is STALE until it verifies: its weights are half another version's, or not the newest.
-- uses: _args, _fleet, _run

local function load_epoch(run)
  local values = redis.call('HMGET', run.base .. 'epoch', 'id', 'version', 'timeline', 'state', 'rendezvous')
  if not values[1] then return nil end
  return {id = values[1], version = tonumber(values[2]), timeline = values[3], state = values[4], rendezvous = values[5]}
end

local function reply_epoch(run, epoch)
  local members = redis.call('HGETALL', run.base .. 'members')
  local fields = {id = epoch.id, version = epoch.version, timeline = epoch.timeline, state = epoch.state, members = members}
  return {cmsgpack.pack(fields), epoch.rendezvous}
end

local function set_state(run, epoch, state)
  epoch.state = state
  redis.call('HSET', run.base .. 'epoch', 'state', state)
  event(run, 'epoch', 'epoch', epoch.id, 'version', epoch.version, 'state', state)
  wake(run, 'epoch')
  wake(run, 'work')
end

local function set_stale(run, id, reason)
  if redis.call('HGET', replica_key(run, id), 'state') == 'HEALTHY' then
    redis.call('HSET', replica_key(run, id), 'state', 'STALE', 'reason', words(reason))
    event(run, 'replica', 'replica', id, 'state', 'STALE', 'reason', words(reason))
  end
end

-- The epoch if it is the newest one, of this timeline, and in one of `states`.
local function require_epoch(run, id, states)
  local epoch = load_epoch(run)
  if not epoch or epoch.id ~= id then refuse('HR_FENCED', 'epoch ' .. show(id) .. ' is not the newest') end
  if epoch.timeline ~= run.timeline then refuse('HR_TIMELINE', 'a rewind has ended the timeline of epoch ' .. id) end
  if not states[epoch.state] then refuse('HR_FENCED', 'epoch ' .. id .. ' is ' .. epoch.state) end
  return epoch
end

local function require_member(run, replica, wanted)
  local state = redis.call('HGET', replica_key(run, replica), 'state')
  if not state or state == 'DEAD' then refuse('HR_FENCED', 'replica ' .. replica .. ' is DEAD; it has to register again') end
  local did = redis.call('HGET', run.base .. 'members', replica)
  if not did or not wanted[did] then
    refuse('HR_FENCED', 'replica ' .. replica .. ' is not a member of the epoch that may do this (' .. tostring(did) .. ')')
  end
  return did
end
