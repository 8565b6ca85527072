-- open_epoch: announce a membership epoch to every replica that is HEALTHY or STALE, does not hold its weights, does not pull them, and
-- does not validate others; any epoch before it is over.
-- KEYS     the run
-- ARGV     epoch (a nonce), version, timeline; then the rendezvous (msgpack)
-- Returns  msgpack: id, version, timeline, state, members (each followed by what it did); then the rendezvous. A repeat returns the same
--          epoch.
-- Errors   HR_TIMELINE, HR_FENCED (the call arrives late: another epoch was opened since), HR_INVALID
-- uses: _args, _epoch, _fleet, _register, _run
register('open_epoch', {epoch = name, version = natural, timeline = text}, function(run, call, args)
  local id, version, timeline = call.epoch, call.version, call.timeline
  local rendezvous = require_rendezvous(args)
  require_timeline(run, timeline)
  local before = load_epoch(run)
  if before and before.id == id then return reply_epoch(run, before) end
  if redis.call('SADD', run.base .. 'epochs', id) == 0 then refuse('HR_FENCED', 'epoch ' .. id .. ' is over; use a new nonce') end
  local epoch = {id = id, version = version, timeline = timeline, rendezvous = rendezvous}
  redis.call('HSET', run.base .. 'epoch', 'id', id, 'version', version, 'timeline', timeline, 'rendezvous', rendezvous)
  redis.call('UNLINK', run.base .. 'members')
  for _, replica in ipairs(redis.call('ZRANGE', run.base .. 'replicas', 0, -1)) do
    if takes_part(redis.call('HGET', replica_key(run, replica), 'state')) and not keeps(run, replica, epoch) then
      redis.call('HSET', run.base .. 'members', replica, 'asked')
    end
  end
  set_state(run, epoch, 'announced')
  return reply_epoch(run, epoch)
end, true)
