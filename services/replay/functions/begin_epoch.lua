-- begin_epoch: start the transfer. The members that acknowledged are final. Replicas that don't hold the epoch's weights, nor pull their
-- own, nor validate others, are STALE.
-- KEYS     the run
-- ARGV     epoch; logprobs (the trainer's, of the probe), tolerance and mean_tolerance (nats), which `verify` uses; then the rendezvous
--          (msgpack)
-- Returns  the epoch, like open_epoch. A repeat returns the same epoch.
-- Errors   HR_FENCED, HR_TIMELINE, HR_INVALID
-- uses: _args, _epoch, _register
register('begin_epoch', {
  epoch = name, logprobs = list_of(finite, 32 * BATCH), tolerance = finite, mean_tolerance = finite,
}, function(run, call, args)
  local id = call.epoch
  local rendezvous = require_rendezvous(args)
  if #call.logprobs == 0 then refuse('HR_INVALID', 'no log-probabilities; an empty probe proves nothing') end
  local epoch = require_epoch(run, id, {announced = true, transfer = true})
  if epoch.state == 'transfer' then return reply_epoch(run, epoch) end
  epoch.rendezvous = rendezvous
  local reference = cmsgpack.pack({
    logprobs = call.logprobs, tolerance = call.tolerance, mean_tolerance = call.mean_tolerance,
  })
  redis.call('HSET', run.base .. 'epoch', 'rendezvous', rendezvous, 'reference', reference)
  local members = redis.call('HGETALL', run.base .. 'members')
  for i = 1, #members, 2 do
    if members[i + 1] == 'asked' then redis.call('HSET', run.base .. 'members', members[i], 'left out') end
  end
  for _, replica in ipairs(redis.call('ZRANGE', run.base .. 'replicas', 0, -1)) do
    if not keeps(run, replica, epoch) then
      set_stale(run, replica, 'epoch ' .. id .. ' installs version ' .. epoch.version)
    end
  end
  set_state(run, epoch, 'transfer')
  return reply_epoch(run, epoch)
end, true)
