-- refuse: the replica could not complete the epoch, or install the weights that it has pulled.
-- KEYS     the run
-- ARGV     replica, epoch (or offer), reason, interrupted (the collective failed through no fault of the replica)
-- Returns  1; the replica is STALE
-- Errors   HR_FENCED, HR_TIMELINE, HR_INVALID
-- uses: _args, _epoch, _fleet, _offers, _register, _run
register('refuse', {replica = name, epoch = name, reason = text, interrupted = flag}, function(run, call)
  local replica, id = call.replica, call.epoch
  if pulls_weights(run, replica) then
    redis.call('HSET', replica_key(run, replica), 'tried', require_offer(run, replica, id).version)
    set_stale(run, replica, call.reason)
    return 1
  end
  require_epoch(run, id, {announced = true, transfer = true})
  if not redis.call('HGET', run.base .. 'members', replica) then
    refuse('HR_FENCED', 'replica ' .. replica .. ' is not a member of epoch ' .. id)
  end
  redis.call('HSET', run.base .. 'members', replica, (call.interrupted and 'interrupted ' or 'refused ') .. words(call.reason))
  set_stale(run, replica, call.reason)
  wake(run, 'epoch')
  return 1
end)
