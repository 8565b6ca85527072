-- parents: whom a replica that pulls asks for what it fetches before it asks the store, the nearest first (_offers.lua).
-- KEYS     the run
-- ARGV     replica
-- Returns  for each the id and the info (msgpack); none for one that reads from the store alone. One that has verified older weights than
--          this replica is left out: it is slower, and who waits for it falls back with it
-- uses: _args, _fleet, _register

-- To how many the store, and each replica, sends a version. The last one waits for so many copies over one link, and for a block at each
-- level of the tree. So the fewest are best.
local FAN_OUT = 2

register_reader('parents', {replica = name}, function(run, call)
  local parents = {}
  local place = redis.call('ZRANK', run.base .. 'pullers', call.replica)
  local own = tonumber(redis.call('HGET', replica_key(run, call.replica), 'version') or -1)
  while place and place >= FAN_OUT do
    place = math.floor(place / FAN_OUT) - 1
    local id = redis.call('ZRANGE', run.base .. 'pullers', place, place)[1]
    local state, info, version = unpack(redis.call('HMGET', replica_key(run, id), 'state', 'info', 'version'))
    if takes_part(state) and tonumber(version) >= own then parents[#parents + 1] = {id, info} end
  end
  return parents
end)
