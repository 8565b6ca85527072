-- deregister: a replica leaves the fleet.
-- KEYS     the run
-- ARGV     replica, died (its engine died, or it ends because of another error)
-- Returns  the number of groups that it still holds: repeat the call until 0. Its groups are passed on without charging an attempt. If it
--          died, they are treated as after a lost heartbeat (`suspect` in _group.lua).
-- Errors   HR_INVALID
-- uses: _args, _fleet, _member, _register
register('deregister', {replica = name, died = flag}, function(run, call)
  local key = replica_key(run, call.replica)
  if redis.call('EXISTS', key) == 1 then redis.call('HSET', key, 'state', 'STALE') end
  return leave_fleet(run, call.replica, call.died)
end)
