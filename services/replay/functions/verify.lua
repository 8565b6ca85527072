-- verify: the replica's log-probabilities of the probe under the epoch's weights, which are compared with the trainer's (begin_epoch): the
-- only way to HEALTHY.
-- KEYS     the run
-- ARGV     replica, epoch, logprobs (nats, one for each of the trainer's)
-- Returns  msgpack: verified, difference (the largest, in nats). Verified: HEALTHY at the epoch's version; else STALE, the difference is not
--          within the epoch's tolerance
-- Errors   HR_FENCED, HR_TIMELINE, HR_INVALID (not finite, or another number of them)
-- uses: _args, _epoch, _fleet, _register, _run
local function largest_difference(ours, theirs)
  if #ours ~= #theirs then refuse('HR_INVALID', #theirs .. ' log-probabilities for a probe of ' .. #ours) end
  local largest = 0
  for i = 1, #ours do largest = math.max(largest, math.abs(ours[i] - theirs[i])) end
  return largest
end

register('verify', {replica = name, epoch = name, logprobs = list_of(finite, 4 * BATCH)}, function(run, call)
  local replica = call.replica
  local epoch = require_epoch(run, call.epoch, {transfer = true})
  local did = require_member(run, replica, {acknowledged = true, verified = true})
  local reference = cmsgpack.unpack(redis.call('HGET', run.base .. 'epoch', 'reference'))
  local difference = largest_difference(reference.logprobs, call.logprobs)
  local verified = difference <= reference.tolerance
  wake(run, 'epoch')
  if verified and did ~= 'verified' then
    redis.call('HSET', run.base .. 'members', replica, 'verified')
    redis.call('HSET', replica_key(run, replica), 'state', 'HEALTHY', 'version', epoch.version, 'timeline', run.timeline, 'reason', '')
    event(run, 'replica', 'replica', replica, 'state', 'HEALTHY', 'version', epoch.version)
  elseif not verified then
    local reason = 'log-probabilities of the probe differ by ' .. difference .. ', tolerance ' .. reference.tolerance
    redis.call('HSET', run.base .. 'members', replica, 'refused ' .. reason)
    set_stale(run, replica, reason)
  end
  return cmsgpack.pack({verified = verified, difference = difference})
end)
