-- lease_episodes: a runner takes groups of episodes, as _lease.lua says, each with all the episodes that it misses.
-- KEYS     the run
-- ARGV     runner, slots, validation_slots (episodes that it can start, of training and of validation), number (of this call, higher than that of
--          any before), nonce (tokens are made of it)
-- Returns  msgpack: as `lease`; version is the lowest that a HEALTHY replica holds, and without one nothing is leased. A group that had a lease
--          before has tries too: of episodes that were begun before, index and how often
-- Errors   HR_FENCED: the runner is not there, or the call arrives late; HR_INVALID
-- uses: _args, _fleet, _lease, _register

-- Of the weights that verified replicas hold on this timeline; nil if none does.
local function lowest_version(run)
  local lowest
  for _, replica in ipairs(redis.call('ZRANGE', run.base .. 'replicas', 0, -1)) do
    local state, version, timeline = unpack(redis.call('HMGET', replica_key(run, replica), 'state', 'version', 'timeline'))
    if state_of(run, state, timeline) == 'HEALTHY' then lowest = math.min(lowest or math.huge, tonumber(version)) end
  end
  return lowest
end

register('lease_episodes', {runner = name, slots = natural, validation_slots = natural, number = positive, nonce = name}, function(run, call)
  local holder = runner_name(call.runner)
  return answer_lease(run, call, holder, function()
    local state, cohort = unpack(redis.call('HMGET', replica_key(run, holder), 'state', 'cohort'))
    if state ~= 'ALIVE' then refuse('HR_FENCED', 'runner ' .. call.runner .. ' is not there; it has to enter under a new name') end
    local version = lowest_version(run)
    if not version then return {timeline = run.timeline, incarnation = run.incarnation, version = -1, leases = {}} end
    return lease_to(run, {
      holder = holder, kind = 'episodes', version = version, nonce = call.nonce, most = BATCH, cohort = cohort,
      slots = {train = call.slots, validation = call.validation_slots}, leases = {},
    })
  end)
end, false, true)
