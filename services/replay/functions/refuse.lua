-- refuse: the replica could not complete the epoch.
-- KEYS     the run
-- ARGV     replica, epoch, reason
-- Returns  1; the replica is STALE
-- Errors   HR_FENCED, HR_TIMELINE, HR_INVALID
register('hr_refuse', 3, function(run, args)
  local replica, id = name(args[1], 'replica'), name(args[2], 'epoch')
  require_epoch(run, id, {announced = true, transfer = true})
  if not redis.call('HGET', run.base .. 'members', replica) then
    refuse('HR_FENCED', 'replica ' .. replica .. ' is not a member of epoch ' .. id)
  end
  redis.call('HSET', run.base .. 'members', replica, 'refused ' .. words(args[3]))
  set_stale(run, replica, args[3])
  wake(run, 'epoch')
  return 1
end)
