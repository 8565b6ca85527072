-- The fleet. A replica is HEALTHY (verified weights of this timeline), STALE, DEAD or QUARANTINED (quarantine.lua).
-- One that is LOADING its engine is known to come, and no more: it leaves when the engine is up, and registers under a new name.
-- There is no way from STALE or new to HEALTHY but `verify`, and none from DEAD or QUARANTINED: such a replica registers under a new name.
--
-- Runners lease episodes. They hold no weights: they are in no epoch, and not among the replicas. A runner is ALIVE or DEAD, and dies as a
-- replica does.
-- uses: _run

local function replica_key(run, id) return run.base .. 'r:' .. id end

-- What a runner is called among those that hold groups: no replica's name has a space.
local function runner_name(id) return 'runner ' .. id end

-- Of one that holds groups: `runner` or `replica`, and its id.
local function told_apart(holder)
  local id = string.match(holder, '^runner (.+)$')
  return id and 'runner' or 'replica', id or holder
end

local function registry_of(run, holder) return run.base .. told_apart(holder) .. 's' end

local function see(run, holder, ...)
  local dead_at = run.now + run.replica_dead_ms
  redis.call('ZADD', registry_of(run, holder), dead_at, holder)
  redis.call('HSET', replica_key(run, holder), 'seen', run.now, ...)
  due_at(run, dead_at)
end

-- It enters, leaves or dies.
local function tell_state(run, holder, state)
  local kind, id = told_apart(holder)
  event(run, kind, kind, id, 'state', state)
  wake(run, 'epoch')
end

-- HEALTHY holds only on the timeline it was proved on.
local function state_of(run, state, timeline)
  if state == 'HEALTHY' and timeline ~= run.timeline then return 'STALE' end
  return state or 'DEAD'
end

-- Whether anyone waits for a replica in this state (as it is written, or as `state_of` gives it): epochs ask it, and it may hold leases.
local function takes_part(state) return state == 'HEALTHY' or state == 'STALE' end
