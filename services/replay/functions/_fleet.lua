-- The fleet. A replica is HEALTHY (verified weights of this timeline), STALE, DEAD or QUARANTINED (quarantine.lua).
-- A LOADING replica is only announced: it leaves when its engine is up, and registers under a new name.
-- A STALE or new replica becomes HEALTHY only through `verify`. A DEAD or QUARANTINED replica never does: it registers under a new name.
--
-- Runners lease episodes. They hold no weights, so they are in no epoch and not among the replicas. A runner is ALIVE or DEAD, and dies in
-- the same way as a replica.
-- uses: _run

local function replica_key(run, id) return run.base .. 'r:' .. id end

-- A runner's name among the holders of groups. No replica's name has a space.
local function runner_name(id) return 'runner ' .. id end

-- The kind (`runner` or `replica`) and the id of a holder of groups.
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

-- Count a member that enters, leaves or dies.
local function tell_state(run, holder, state)
  local kind, id = told_apart(holder)
  event(run, kind, kind, id, 'state', state)
  wake(run, 'epoch')
end

-- The member is no longer counted: others that wait have its share (_lease.lua), and runners lease by the weights of others.
local function uncount(run, id)
  redis.call('SREM', run.base .. 'waiting', id)
  redis.call('ZREM', run.base .. 'pullers', id)
  wake(run, 'work')
end

-- A replica is HEALTHY only on the timeline on which that was proved.
local function state_of(run, state, timeline)
  if state == 'HEALTHY' and timeline ~= run.timeline then return 'STALE' end
  return state or 'DEAD'
end

-- Whether a replica in this state (as stored, or as `state_of` returns it) is waited for: epochs include it, and it may hold leases.
local function takes_part(state) return state == 'HEALTHY' or state == 'STALE' end

-- Whether the replica pulls its weights (_offers.lua), so that no epoch is for it.
local function pulls_weights(run, id) return redis.call('HGET', replica_key(run, id), 'pulls') == '1' end

-- Whether groups of the validation are not evaluated yet, and the replica `id`, if one is given, validates beside training
-- (drop_validation.lua names it). Until then it keeps the weights under validation (no epoch asks it, and none makes it STALE) and leases
-- those groups alone, which nobody else leases.
local function validates(run, id)
  if id and redis.call('SISMEMBER', run.base .. 'validators', id) == 0 then return false end
  local states, pending = {'validation:queued', 'validation:open', 'validation:scoring'}, 0
  for i, count in ipairs(redis.call('HMGET', run.base .. 'counts', unpack(states))) do
    pending = pending + (count or 0) + (run.deltas[states[i]] or 0)
  end
  return pending > 0
end

-- Whether a member may lease: a replica must be HEALTHY on this timeline, a runner ALIVE.
local function may_lease(run, holder)
  local state, timeline = unpack(redis.call('HMGET', replica_key(run, holder), 'state', 'timeline'))
  return state == 'ALIVE' or state == 'HEALTHY' and timeline == run.timeline
end
