-- lease: lease groups to a verified replica, which generates them itself. See _lease.lua.
-- KEYS     the run
-- ARGV     replica, most (groups), number (of this call, higher than any before), nonce (from which tokens are made)
-- Returns  msgpack: timeline, incarnation, leases. Each of these has group (id), record (key), token, expires_in_s, attempt, ticket (-1:
--          validation), version (the replica's), count (trajectories of the group); if it had a lease before, also missing (indices to
--          generate) and prefixes (of those that another replica has begun: index and payload key)
-- Errors   HR_NOT_VERIFIED: the replica is not HEALTHY on this timeline; HR_FENCED: the call arrives late; HR_INVALID
-- uses: _args, _fleet, _lease, _register

register('lease', {replica = name, most = positive, number = positive, nonce = name}, function(run, call)
  return answer_lease(run, call, call.replica, function()
    local state, version, timeline, cohort, pulls =
      unpack(redis.call('HMGET', replica_key(run, call.replica), 'state', 'version', 'timeline', 'cohort', 'pulls'))
    version = tonumber(version)
    if state ~= 'HEALTHY' or timeline ~= run.timeline then
      refuse('HR_NOT_VERIFIED', 'replica ' .. call.replica .. ' holds no verified weights of this timeline; it may not lease')
    end
    return lease_to(run, {
      holder = call.replica, kind = validates(run, call.replica) and 'validators' or nil, version = version,
      versions = {[version] = true}, nonce = call.nonce, most = math.min(call.most, BATCH), cohort = cohort,
      pulls = pulls == '1', slots = {train = math.huge, validation = math.huge}, leases = {},
    })
  end)
end, false, true)
