-- deregister: a replica leaves the fleet.
-- KEYS     the run
-- ARGV     replica, died (its engine died, or it ends for another error)
-- Returns  groups it still holds: call again until 0. What it held is passed on without costing an attempt; if it died, as after a heartbeat
--          that was lost (`suspect` in _group.lua).
-- Errors   HR_INVALID
-- uses: _args, _fleet, _member, _register
register('deregister', {replica = name, died = flag}, function(run, call)
  local key = replica_key(run, call.replica)
  if redis.call('EXISTS', key) == 1 then redis.call('HSET', key, 'state', 'STALE') end
  return leave_fleet(run, call.replica, call.died)
end)
