-- register: a replica enters the fleet as STALE, or enters it again.
-- KEYS     the run
-- ARGV     replica (a nonce made at process start), info (msgpack)
-- Returns  1; the replica is STALE
-- Errors   HR_INVALID
register('hr_register', 2, function(run, args)
  local id = name(args[1], 'replica')
  redis.call('HSET', replica_key(run, id), 'state', 'STALE', 'version', -1, 'timeline', run.timeline, 'info', args[2])
  see(run, id)
  event(run, 'replica', 'replica', id, 'state', 'STALE')
  wake(run, 'epoch')
  return 1
end)
