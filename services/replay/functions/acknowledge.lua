-- acknowledge: a member is able to take part.
-- KEYS     the run
-- ARGV     replica, epoch
-- Returns  1 (idempotent)
-- Errors   HR_FENCED (no longer announced, not a member, DEAD, QUARANTINED), HR_TIMELINE, HR_INVALID
-- uses: _args, _epoch, _register, _run
register('acknowledge', {replica = name, epoch = name}, function(run, call)
  local replica, id = call.replica, call.epoch
  require_epoch(run, id, {announced = true})
  require_member(run, replica, {asked = true, acknowledged = true})
  redis.call('HSET', run.base .. 'members', replica, 'acknowledged')
  wake(run, 'epoch')
  return 1
end)
