-- acknowledge: a member is able to take part.
-- KEYS     the run
-- ARGV     replica, epoch
-- Returns  1 (idempotent)
-- Errors   HR_FENCED (no longer announced, not a member, DEAD), HR_TIMELINE, HR_INVALID
register('hr_acknowledge', 2, function(run, args)
  local replica, id = name(args[1], 'replica'), name(args[2], 'epoch')
  require_epoch(run, id, {announced = true})
  require_member(run, replica, {asked = true, acknowledged = true})
  redis.call('HSET', run.base .. 'members', replica, 'acknowledged')
  wake(run, 'epoch')
  return 1
end)
