-- verify: the probe's largest |log-probability difference| under the epoch's weights.
-- KEYS     the run
-- ARGV     replica, epoch, difference, tolerance (nats)
-- Returns  1: HEALTHY at the epoch's version; 0: STALE, the difference (nan too) is not within the tolerance
-- Errors   HR_FENCED, HR_TIMELINE, HR_INVALID
-- nan and inf too: they are no proof.
-- uses: _args, _epoch, _fleet, _register, _run
local function number(value, what)
  if type(value) ~= 'number' then refuse('HR_INVALID', what .. ' is ' .. show(value) .. ', not a number') end
  return value
end

register('hr_verify', {replica = name, epoch = name, difference = number, tolerance = finite}, function(run, call)
  local replica, difference, tolerance = call.replica, call.difference, call.tolerance
  local epoch = require_epoch(run, call.epoch, {transfer = true})
  require_member(run, replica, {acknowledged = true, verified = true})
  wake(run, 'epoch')
  if not (difference >= 0 and difference <= tolerance) then
    local reason = 'log-probabilities differ by ' .. (difference == difference and difference or 'nan') .. ', tolerance ' .. tolerance
    redis.call('HSET', run.base .. 'members', replica, 'refused ' .. reason)
    set_stale(run, replica, reason)
    return 0
  end
  redis.call('HSET', run.base .. 'members', replica, 'verified')
  redis.call('HSET', replica_key(run, replica), 'state', 'HEALTHY', 'version', epoch.version, 'timeline', run.timeline, 'reason', '')
  event(run, 'replica', 'replica', replica, 'state', 'HEALTHY', 'version', epoch.version)
  return 1
end)
