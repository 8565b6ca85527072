-- register
-- KEYS     the run
-- ARGV     replica (a nonce made at process start), info (msgpack)
-- Returns  1; the replica is STALE
-- Errors   HR_INVALID
register('hr_register', function(run, args)
  local id = name(args[1], 'replica')
  if #args ~= 2 then refuse('HR_INVALID', #args .. ' arguments, not 2') end
  redis.call('HSET', replica_key(run, id), 'state', 'STALE', 'version', -1, 'timeline', run.timeline, 'info', args[2])
  see(run, id)
  event(run, 'replica', 'replica', id, 'state', 'STALE')
  wake(run, 'epoch')
  return 1
end)
