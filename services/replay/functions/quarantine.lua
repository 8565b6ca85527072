-- quarantine: stop waiting for a replica that keeps disagreeing with the trainer, or keeps failing refits. It takes part in no epoch and
-- gets no lease; it can come back by registering under a new name. The trajectories that it handed in were valid and stay. Its groups are
-- passed on, `LOST` of them at once; no heartbeat renews the others.
-- KEYS     the run
-- ARGV     client, number (of this client's call, higher than any before), replica, timeline, reason
-- Returns  1: it is QUARANTINED; 0: nothing has changed, because no other replica is HEALTHY, or this one is DEAD or has left. A call that
--          arrives again, or late, changes nothing: a refused quarantine stays refused
-- Errors   HR_TIMELINE, HR_INVALID
-- uses: _args, _due, _fleet, _register, _run
local function another_is_healthy(run, id)
  for _, other in ipairs(redis.call('ZRANGE', run.base .. 'replicas', 0, -1)) do
    local state, timeline = unpack(redis.call('HMGET', replica_key(run, other), 'state', 'timeline'))
    if other ~= id and state_of(run, state, timeline) == 'HEALTHY' then return true end
  end
  return false
end

register('quarantine', {
  client = name, number = positive, replica = name, timeline = text, reason = text,
}, function(run, call)
  local id = call.replica
  require_timeline(run, call.timeline)
  local late = made_before(run, 'quarantine', call)
  local state = redis.call('HGET', replica_key(run, id), 'state')
  if state == 'QUARANTINED' then return 1 end
  if late or not takes_part(state) or not another_is_healthy(run, id) then return 0 end
  redis.call('HSET', replica_key(run, id), 'state', 'QUARANTINED', 'reason', words(call.reason))
  take_back(run, id, false)
  event(run, 'replica', 'replica', id, 'state', 'QUARANTINED', 'reason', words(call.reason))
  wake(run, 'epoch')
  wake(run, 'work')  -- as when it leaves (_fleet.lua)
  return 1
end)
