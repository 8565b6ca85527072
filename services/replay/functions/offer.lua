-- offer: name a version of the weights that is in the run's store, whole, for replicas that pull (_offers.lua).
-- KEYS     the run
-- ARGV     offer (a nonce), version, timeline; logprobs (the trainer's, of the probe), tolerance and mean_tolerance (nats), which `verify`
--          uses; then the rendezvous (msgpack), which says where it is
-- Returns  1; 0 if as new a version has been offered on this timeline
-- Errors   HR_TIMELINE, HR_INVALID
-- uses: _args, _epoch, _register, _run
register('offer', {
  offer = name, version = natural, timeline = text, logprobs = list_of(finite, 32 * BATCH), tolerance = finite, mean_tolerance = finite,
}, function(run, call, args)
  local rendezvous = require_rendezvous(args)
  if #call.logprobs == 0 then refuse('HR_INVALID', 'no log-probabilities; an empty probe proves nothing') end
  require_timeline(run, call.timeline)
  if call.version <= tonumber(redis.call('HGET', run.base .. 'offer', 'version') or -1) then return 0 end
  local known = redis.call('HGETALL', run.base .. 'offers')
  for i = 1, #known, 2 do
    if cmsgpack.unpack(known[i + 1]).version < call.version - run.reach then redis.call('HDEL', run.base .. 'offers', known[i]) end
  end
  redis.call('HSET', run.base .. 'offer', 'id', call.offer, 'version', call.version, 'rendezvous', rendezvous)
  redis.call('HSET', run.base .. 'offers', call.offer, cmsgpack.pack({
    version = call.version, logprobs = call.logprobs, tolerance = call.tolerance, mean_tolerance = call.mean_tolerance,
  }))
  wake(run, 'work')
  return 1
end, true)
