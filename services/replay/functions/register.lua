-- register: a replica enters the fleet as STALE, or enters it again.
-- KEYS     the run
-- ARGV     replica (a nonce made at process start); then its info (msgpack)
-- Returns  1; the replica is STALE
-- Errors   HR_INVALID
-- uses: _args, _fleet, _register, _run
register('hr_register', {replica = name}, function(run, call, args)
  local id = call.replica
  require_bytes(1, args)
  redis.call('HSET', replica_key(run, id), 'state', 'STALE', 'version', -1, 'timeline', run.timeline, 'info', args[2])
  redis.call('HDEL', replica_key(run, id), 'together', 'cohort')
  see(run, id)
  event(run, 'replica', 'replica', id, 'state', 'STALE')
  wake(run, 'epoch')
  return 1
end, true)
