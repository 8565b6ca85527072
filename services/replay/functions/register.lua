-- register: a replica enters the fleet as STALE.
-- KEYS     the run
-- ARGV     replica (a nonce, never used again once it has left or died), incarnation; then its info (msgpack)
-- Returns  1; a replica that is in the fleet stays as it is
-- Errors   HR_FENCED (it has left or died), HR_TIMELINE, HR_INVALID
-- uses: _args, _fleet, _register, _run
register('hr_register', {replica = name, incarnation = text}, function(run, call, args)
  local id = call.replica
  require_bytes(1, args)
  require_incarnation(run, call.incarnation)
  local state = redis.call('HGET', replica_key(run, id), 'state')
  if state == 'DEAD' or redis.call('SISMEMBER', run.key .. ':used', id) == 1 then
    refuse('HR_FENCED', 'replica ' .. id .. ' has left or died; enter the fleet under a new name')
  end
  if state then return 1 end
  redis.call('HSET', replica_key(run, id), 'state', 'STALE', 'version', -1, 'timeline', run.timeline, 'info', args[2])
  redis.call('HDEL', replica_key(run, id), 'together', 'cohort')
  see(run, id)
  event(run, 'replica', 'replica', id, 'state', 'STALE')
  wake(run, 'epoch')
  return 1
end, true)
