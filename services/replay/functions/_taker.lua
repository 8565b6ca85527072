-- A `taker`: a member that takes groups, and what a group needs of it.
--
-- holder (its name in the registry), kind (of the groups that it takes), version (that training goes by), versions (the set of those that
-- may write for it: its own, or for a runner those of all replicas), nonce, most (groups that it may still get), slots (trajectories that
-- it can still start, by lane; a group starts with everything that it misses, or not at all), cohort (whether the groups that it holds, if
-- any, are suspects), leases (what it got), any_broken (whether any environment's breaker is open), pulls (whether it is a replica that
-- pulls its weights, see _offers.lua).
-- uses: _group, _run

-- The oldest weights that a lease of the group allows. A validation is written by the version that it evaluates, and by no other (law 2).
local function version_for(taker, group)
  return group.lane == 'train' and taker.version or tonumber(redis.call('HGET', group.key, 'validation'))
end

-- Whether the taker's weights may write this group. Replicas in epochs train with the newest; those of a replica that pulls may be too old
-- to be trained on (law 2).
local function may_write(run, taker, group)
  local version = version_for(taker, group)
  return taker.versions[version] and (group.lane ~= 'train' or not taker.pulls or may_work_under(run, version))
end

local function lease_token(nonce, number, group)
  return nonce .. '-' .. number .. '/' .. group.id
end

-- Give the group to the taker until its lease ends. Returns in how many milliseconds that is.
local function hold_lease(run, group, taker)
  local ends = advance(run, group.key, 0)
  redis.call('ZADD', run.base .. 'leases', ends, group.id)
  redis.call('SADD', run.base .. 'h:' .. taker.holder, group.id)
  return ends - run.now
end

-- Whether the taker has room for this many trajectories of one group. If not, it gets nothing more of that lane: a wide group must not
-- starve.
local function has_slots(taker, lane, count)
  if count <= taker.slots[lane] then return true end
  taker.slots[lane] = 0
  return false
end

local function give(taker, lease, lane, count)
  taker.leases[#taker.leases + 1] = lease
  taker.most, taker.slots[lane] = taker.most - 1, taker.slots[lane] - count
end
