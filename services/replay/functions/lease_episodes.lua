-- lease_episodes: lease groups of episodes to a runner, each with all the episodes that it misses. See _lease.lua.
-- KEYS     the run
-- ARGV     runner, slots, validation_slots (training and validation episodes that it can start), number (of this call, higher than any
--          before), nonce (from which tokens are made)
-- Returns  msgpack: like `lease`; version is the lowest that a HEALTHY replica holds, or the one that a validation evaluates, and what no
--          replica holds is not leased. A group that had a lease before also has tries: index and count of the episodes that were begun
--          before
-- Errors   HR_FENCED: the runner is not registered, or the call arrives late; HR_INVALID
-- uses: _args, _fleet, _lease, _register, _run

-- The versions of the weights that verified replicas hold on this timeline and work may begin under, as a set; and the lowest, nil if there
-- is none.
local function versions_held(run)
  local held, lowest = {}, nil
  for _, replica in ipairs(redis.call('ZRANGE', run.base .. 'replicas', 0, -1)) do
    local state, version, timeline, pulls =
      unpack(redis.call('HMGET', replica_key(run, replica), 'state', 'version', 'timeline', 'pulls'))
    local there = state_of(run, state, timeline) == 'HEALTHY' and (pulls ~= '1' or may_work_under(run, tonumber(version)))
    if there then held[tonumber(version)], lowest = true, math.min(lowest or math.huge, tonumber(version)) end
  end
  return held, lowest
end

register('lease_episodes', {
  runner = name, slots = natural, validation_slots = natural, number = positive, nonce = name,
}, function(run, call)
  local holder = runner_name(call.runner)
  return answer_lease(run, call, holder, function()
    local state, cohort = unpack(redis.call('HMGET', replica_key(run, holder), 'state', 'cohort'))
    if state ~= 'ALIVE' then refuse('HR_FENCED', 'runner ' .. call.runner .. ' is not registered; it must register under a new name') end
    local versions, version = versions_held(run)
    if not version then return {timeline = run.timeline, incarnation = run.incarnation, leases = {}} end
    return lease_to(run, {
      holder = holder, kind = 'episodes', version = version, versions = versions, nonce = call.nonce, most = BATCH, cohort = cohort,
      slots = {train = call.slots, validation = call.validation_slots}, leases = {},
    })
  end)
end, false, true)
