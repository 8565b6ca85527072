-- verify: the probe's largest |log-probability difference| under the epoch's weights.
-- KEYS     the run
-- ARGV     replica, epoch, difference, tolerance (nats)
-- Returns  1: HEALTHY at the epoch's version; 0: STALE, the difference (nan too) is not within the tolerance
-- Errors   HR_FENCED, HR_TIMELINE, HR_INVALID
register('hr_verify', 4, function(run, args)
  local replica, id = name(args[1], 'replica'), name(args[2], 'epoch')
  local difference, tolerance = tonumber(args[3]), finite(args[4], 'tolerance')
  if not difference then refuse('HR_INVALID', 'difference is ' .. show(args[3]) .. ', not a number') end
  local epoch = require_epoch(run, id, {transfer = true})
  require_member(run, replica, {acknowledged = true, verified = true})
  wake(run, 'epoch')
  if not (difference >= 0 and difference <= tolerance) then
    local reason = 'log-probabilities differ by ' .. show(args[3]) .. ', tolerance ' .. args[4]
    redis.call('HSET', run.base .. 'members', replica, 'refused ' .. reason)
    set_stale(run, replica, reason)
    return 0
  end
  redis.call('HSET', run.base .. 'members', replica, 'verified')
  redis.call('HSET', replica_key(run, replica), 'state', 'HEALTHY', 'version', epoch.version, 'timeline', run.timeline, 'reason', '')
  event(run, 'replica', 'replica', replica, 'state', 'HEALTHY', 'version', epoch.version)
  return 1
end)
