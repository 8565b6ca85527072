-- Offers: versions of the weights in the run's store, for replicas that pull them. Nothing waits for such a replica. It is in no epoch, and
-- keeps the weights that it has until newer ones are in its engine; `may_write` says what they may still write.
--
-- They pull from each other (parents.lua): by the order in which they came they form a tree, whose root is the store. Each asks only those
-- that were there before, so none waits for one that waits for it. Nothing rests on the tree: who is asked in vain costs a little time.
--
-- offer    hash: id, version and rendezvous (msgpack) of the newest
-- offers   hash: id -> msgpack: version, and what `verify` compares with: logprobs (the trainer's, of the probe), tolerance and
--          mean_tolerance. They are of this timeline, and kept while work may begin under the version
-- pullers  zset: those that are alive, by when they came
-- A replica's `tried` is the newest version that it has verified or refused. It verifies none of before: a call that arrives late must not
-- take the place of a later one. After a failure it registers under a new name.
-- uses: _args, _epoch, _fleet, _run

-- The offer under which the replica reports.
local function require_offer(run, replica, id)
  local packed = redis.call('HGET', run.base .. 'offers', id)
  local offer = packed and cmsgpack.unpack(packed)
  if not offer or not may_work_under(run, offer.version) then
    refuse('HR_FENCED', 'offer ' .. show(id) .. ' is over: newer weights have superseded it, or a rewind has ended its timeline')
  end
  local state, tried = unpack(redis.call('HMGET', replica_key(run, replica), 'state', 'tried'))
  if not takes_part(state) then
    refuse('HR_FENCED', 'replica ' .. replica .. ' is ' .. (state or 'DEAD') .. '; it must register again')
  end
  offer.timeline = run.timeline
  local last = tonumber(tried or -1)
  if offer.version < last or offer.version == last and not holds(run, replica, offer) then
    refuse('HR_FENCED', 'replica ' .. replica .. ' has tried version ' .. last .. '; it must register again')
  end
  return offer
end
