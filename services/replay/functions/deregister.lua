-- deregister: a replica leaves the fleet.
-- KEYS     the run
-- ARGV     replica, died (its engine died, or it ends for another error)
-- Returns  groups it still holds: call again until 0. What it held is passed on without costing an attempt; if it died, as after a heartbeat
--          that was lost (`suspect` in _group.lua).
-- Errors   HR_INVALID
-- uses: _args, _due, _fleet, _register, _run
register('deregister', {replica = name, died = flag}, function(run, call)
  local id = call.replica
  if redis.call('EXISTS', replica_key(run, id)) == 0 then return 0 end
  redis.call('HSET', replica_key(run, id), 'state', 'STALE')
  redis.call('HSETNX', replica_key(run, id), 'left_with', redis.call('SCARD', run.base .. 'h:' .. id))
  if not take_back(run, id, call.died) then
    return redis.call('SCARD', run.base .. 'h:' .. id)
  end
  redis.call('UNLINK', replica_key(run, id))
  redis.call('ZREM', run.base .. 'replicas', id)
  retire(run, id)
  event(run, 'replica', 'replica', id, 'state', 'LEFT')
  wake(run, 'epoch')
  return 0
end)
