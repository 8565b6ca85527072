-- offered: the newest version that a replica may pull.
-- KEYS     the run
-- ARGV     none
-- Returns  msgpack: id, version, timeline; then the rendezvous. nil if there is none
-- uses: _register
register_reader('offered', nil, function(run)
  local id, version, rendezvous = unpack(redis.call('HMGET', run.base .. 'offer', 'id', 'version', 'rendezvous'))
  return id and {cmsgpack.pack({id = id, version = tonumber(version), timeline = run.timeline}), rendezvous}
end)
