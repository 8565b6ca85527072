-- open_epoch: announce a membership epoch to every replica that is not DEAD; any epoch before it is over.
-- KEYS     the run
-- ARGV     epoch (a nonce), version, timeline, rendezvous (msgpack)
-- Returns  the epoch: id, version, timeline, state, rendezvous, {member, what it did, …}. Repeating it gives the same epoch.
-- Errors   HR_TIMELINE, HR_INVALID
register('hr_open_epoch', 4, function(run, args)
  local id, version, timeline = name(args[1], 'epoch'), natural(args[2], 'version'), args[3]
  require_timeline(run, timeline)
  local before = load_epoch(run)
  if before and before.id == id then return reply_epoch(run, before) end
  local epoch = {id = id, version = version, timeline = timeline, rendezvous = args[4]}
  redis.call('HSET', run.base .. 'epoch', 'id', id, 'version', version, 'timeline', timeline, 'rendezvous', args[4])
  redis.call('UNLINK', run.base .. 'members')
  for _, replica in ipairs(redis.call('ZRANGE', run.base .. 'replicas', 0, -1)) do
    if redis.call('HGET', replica_key(run, replica), 'state') ~= 'DEAD' then
      redis.call('HSET', run.base .. 'members', replica, 'asked')
    end
  end
  set_state(run, epoch, 'announced')
  return reply_epoch(run, epoch)
end)
