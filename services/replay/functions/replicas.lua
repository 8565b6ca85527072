-- replicas: the fleet.
-- KEYS     the run
-- ARGV     none
-- Returns  for each replica: id, state, version, timeline, info (msgpack), leases, milliseconds since it was seen
register_reader('hr_replicas', 0, function(run)
  local reply = {}
  for _, id in ipairs(redis.call('ZRANGE', run.base .. 'replicas', 0, -1)) do
    local state, version, timeline, info, seen =
      unpack(redis.call('HMGET', replica_key(run, id), 'state', 'version', 'timeline', 'info', 'seen'))
    state = state_of(run, state, timeline)
    reply[#reply + 1] = {id, state, state == 'HEALTHY' and version or -1, timeline, info,
      redis.call('SCARD', run.base .. 'h:' .. id), run.now - seen}
  end
  return reply
end)
