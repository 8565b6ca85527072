-- The fleet. A replica is HEALTHY (verified weights of this timeline), STALE, DEAD or QUARANTINED (quarantine.lua).
-- There is no way from STALE or new to HEALTHY but `verify`, and none from DEAD or QUARANTINED: such a replica registers under a new name.
-- uses: _run

local function replica_key(run, id) return run.base .. 'r:' .. id end

local function see(run, id, ...)
  local dead_at = run.now + run.replica_dead_ms
  redis.call('ZADD', run.base .. 'replicas', dead_at, id)
  redis.call('HSET', replica_key(run, id), 'seen', run.now, ...)
  due_at(run, dead_at)
end

-- HEALTHY holds only on the timeline it was proved on.
local function state_of(run, state, timeline)
  if state == 'HEALTHY' and timeline ~= run.timeline then return 'STALE' end
  return state or 'DEAD'
end

-- Whether anyone waits for a replica in this state (as it is written, or as `state_of` gives it): epochs ask it, and it may hold leases.
local function takes_part(state) return state == 'HEALTHY' or state == 'STALE' end
