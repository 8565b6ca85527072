-- replicas: list the fleet.
-- KEYS     the run
-- ARGV     none
-- Returns  for each replica: msgpack of id, state, version, timeline, leases, seen_s_ago, reason (of a quarantine), pulls, validates
--          (beside training, see _fleet.lua), unreached (why others that pull did not reach it, lately) and, once a step has trained on its
--          tokens, logprob_error (disagreements.lua); and its info (msgpack)
-- uses: _fleet, _register

local SHOWN_MS = 600000

register_reader('replicas', nil, function(run)
  local reply = {}
  for _, id in ipairs(redis.call('ZRANGE', run.base .. 'replicas', 0, -1)) do
    local state, version, timeline, info, seen, reason, logprob_error, pulls, unreached, unreached_at = unpack(redis.call(
      'HMGET', replica_key(run, id), 'state', 'version', 'timeline', 'info', 'seen', 'reason', 'logprob_error', 'pulls', 'unreached',
      'unreached_at'))
    state = state_of(run, state, timeline)
    local replica = {
      id = id, state = state, version = state == 'HEALTHY' and tonumber(version) or -1, timeline = timeline,
      leases = redis.call('SCARD', run.base .. 'h:' .. id), seen_s_ago = (run.now - seen) / 1000,
      reason = state == 'QUARANTINED' and reason or '', logprob_error = tonumber(logprob_error or nil),
      pulls = pulls == '1', validates = takes_part(state) and validates(run, id),
      unreached = run.now - (unreached_at or -SHOWN_MS) < SHOWN_MS and unreached or '',
    }
    reply[#reply + 1] = {cmsgpack.pack(replica), info or ''}
  end
  return reply
end)
