-- verify: compare a replica's log-probabilities of the probe under the epoch's weights with the trainer's (begin_epoch), or under those
-- that it has pulled (offer). The only way to HEALTHY.
-- KEYS     the run
-- ARGV     replica, epoch (or offer), logprobs (nats, one for each of the trainer's), finding (where the replica's states begin to differ
--          from the trainer's, if it has compared them)
-- Returns  msgpack: verified, difference (the largest) and mean, in nats, and what the epoch allows of each, tolerance and mean_tolerance.
--          If verified, the replica is HEALTHY at the epoch's version. Otherwise it is STALE, because one of the two exceeds its tolerance
-- Errors   HR_FENCED, HR_TIMELINE, HR_INVALID (not finite, or another number of them)
-- uses: _args, _epoch, _fleet, _offers, _register, _run
-- the largest and the mean difference, and the place of the first that is more than `tolerance` (nil: none is)
local function differences(ours, theirs, tolerance)
  if #ours ~= #theirs then refuse('HR_INVALID', #theirs .. ' log-probabilities for a probe of ' .. #ours) end
  local largest, sum, first = 0, 0, nil
  for i = 1, #ours do
    local difference = math.abs(ours[i] - theirs[i])
    largest, sum = math.max(largest, difference), sum + difference
    if not first and difference > tolerance then first = i end
  end
  return largest, sum / #ours, first
end

register('verify', {replica = name, epoch = name, logprobs = list_of(finite, 32 * BATCH), finding = text}, function(run, call)
  local replica = call.replica
  local offer = pulls_weights(run, replica) and require_offer(run, replica, call.epoch)
  local epoch = offer or require_epoch(run, call.epoch, {transfer = true})
  local did = offer and holds(run, replica, offer) and 'verified'
    or not offer and require_member(run, replica, {acknowledged = true, verified = true})
  local reference = offer or cmsgpack.unpack(redis.call('HGET', run.base .. 'epoch', 'reference'))
  local difference, mean, first = differences(reference.logprobs, call.logprobs, reference.tolerance)
  local verified = difference <= reference.tolerance and mean <= reference.mean_tolerance
  if offer then redis.call('HSET', replica_key(run, replica), 'tried', offer.version) end
  wake(run, 'epoch')
  if verified and did ~= 'verified' then
    if not offer then redis.call('HSET', run.base .. 'members', replica, 'verified') end
    redis.call('HSET', replica_key(run, replica), 'state', 'HEALTHY', 'version', epoch.version, 'timeline', run.timeline, 'reason', '')
    event(run, 'replica', 'replica', replica, 'state', 'HEALTHY', 'version', epoch.version)
    -- runners may lease what this version answers; the end of an epoch wakes them too, once for all its members
    if offer and redis.call('EXISTS', run.base .. 'runners') == 1 then wake(run, 'work') end
  elseif not verified then
    local reason = 'log-probabilities of the probe differ by ' .. difference .. ', tolerance ' .. reference.tolerance
      .. (first and ' (first at token ' .. first + 1 .. ')' or '')  -- the first token has no log-probability
      .. ', and by ' .. mean .. ' in the mean, tolerance ' .. reference.mean_tolerance
      .. (call.finding ~= '' and '; ' .. call.finding or '')
    if not offer then redis.call('HSET', run.base .. 'members', replica, 'refused ' .. words(reason)) end
    set_stale(run, replica, reason)
  end
  return cmsgpack.pack({
    verified = verified, difference = difference, mean = mean, tolerance = reference.tolerance, mean_tolerance = reference.mean_tolerance,
  })
end)
