-- runners: list the runners, which lease episodes.
-- KEYS     the run
-- ARGV     none
-- Returns  for each runner: msgpack of id, alive, leases, seen_s_ago; and its info (msgpack)
-- uses: _fleet, _register
register_reader('runners', nil, function(run)
  local reply = {}
  for _, holder in ipairs(redis.call('ZRANGE', run.base .. 'runners', 0, -1)) do
    local state, info, seen = unpack(redis.call('HMGET', replica_key(run, holder), 'state', 'info', 'seen'))
    local _, id = told_apart(holder)
    local runner = {
      id = id, alive = state == 'ALIVE', leases = redis.call('SCARD', run.base .. 'h:' .. holder), seen_s_ago = (run.now - seen) / 1000,
    }
    reply[#reply + 1] = {cmsgpack.pack(runner), info}
  end
  return reply
end)
