-- Deadlines: every call that writes first ends the leases, scoring tokens, replicas and runners whose time has passed, so that correctness
-- needs no janitor (law 6). The run's `due` is a lower bound of the next deadline: most calls stop there.
-- uses: _fleet, _group, _run, _scoring

-- The most deadlines of one kind, and the most groups of a lost replica, that one call handles. This bounds its time; the next call
-- continues.
local SWEEP = 64
local LOST = 64

local function due(run, what)
  return redis.call('ZRANGEBYSCORE', run.base .. what, '-inf', run.now, 'LIMIT', 0, SWEEP)
end

-- Law 6: the holder has not progressed with the group until its deadline. The group keeps what it has. Its holder is treated as if it had
-- died of it, so an attempt is charged only to a group that is alone with it. An environment that is broken may keep a runner waiting.
local function end_silence(run, group)
  local silent_ms = run.now - (group.moved or group.deadline - run.group_deadline_ms)
  local silence = string.format('made no progress for %.0f s', silent_ms / 1000)
  if is_broken(run, group.env) then
    pass_on(run, group, 'deadline', who(group.replica) .. ' ' .. silence .. ' while the environment is broken')
  else
    local together = redis.call('HGET', replica_key(run, group.replica), 'together')
    suspect(run, group, tonumber(together), 'deadline', silence, 'if it was only slow, raise replay.group_deadline_s')
  end
end

local function expire_leases(run)
  local ids = due(run, 'leases')
  for _, id in ipairs(ids) do
    local group = load_group(run, id)
    if run.now < group.deadline then
      pass_on(run, group, 'lease', 'lease not renewed by ' .. who(group.replica))
    else
      end_silence(run, group)
    end
  end
  return #ids
end

-- A silent scorer has not renewed what it held. Neither the trajectories nor their environment are at fault.
local function expire_scoring(run)
  local most = 0
  for _, env in ipairs(environments_of(run)) do
    local members = due(run, 'taken:' .. env)
    for _, member in ipairs(members) do void_token(run, env, member) end
    most = math.max(most, #members)
  end
  return most
end

-- Give back what a replica or runner holds, at most `LOST` groups. True when nothing is left. If it `died`, each group is suspected
-- together with everything that it held at its last sign of life: since then, scores may have completed some groups without its noticing.
local function take_back(run, holder, died)
  local held = run.base .. 'h:' .. holder
  local left_with, together = unpack(redis.call('HMGET', replica_key(run, holder), 'left_with', 'together'))
  together = tonumber(left_with or together or 0)
  for _, id in ipairs(redis.call('SRANDMEMBER', held, LOST)) do
    local group = load_group(run, id)
    if died then
      suspect(run, group, together, 'dead', 'died')
    else
      pass_on(run, group, 'returned', 'given back by ' .. who(holder))
    end
  end
  return redis.call('EXISTS', held) == 0
end

-- One replica or runner per call, because its groups are the work.
local function expire_holder(run, registry)
  local remember_dead_ms = 600000  -- shown to people
  local id = redis.call('ZRANGEBYSCORE', run.base .. registry, '-inf', run.now, 'LIMIT', 0, 1)[1]
  if not id then return 0 end
  local key = replica_key(run, id)
  if redis.call('HGET', key, 'state') ~= 'DEAD' then
    redis.call('HSET', key, 'state', 'DEAD', 'reason', 'no heartbeat')
    uncount(run, id)
    tell_state(run, id, 'DEAD')
  elseif redis.call('EXISTS', run.base .. 'h:' .. id) == 0 then
    redis.call('UNLINK', key)
    redis.call('ZREM', run.base .. registry, id)
    redis.call('SADD', run.key .. ':used', id)
    return SWEEP
  end
  if take_back(run, id, true) then redis.call('ZADD', run.base .. registry, run.now + remember_dead_ms, id) end
  return SWEEP
end

-- Replicas and runners come before leases: what a dead one held is suspected, even if its leases are over too.
local function expire(run)
  if run.now < run.due then return end
  local most = expire_holder(run, 'replicas')
  if most == 0 then most = expire_holder(run, 'runners') end
  if most == 0 then most = math.max(expire_leases(run), expire_scoring(run)) end
  -- more may be due: the next call continues
  run.backlog = most >= SWEEP
  run.due = run.backlog and run.now or 1e15
  if run.backlog then return end
  local kinds = {'leases', 'replicas', 'runners'}
  for _, env in ipairs(environments_of(run)) do kinds[#kinds + 1] = 'taken:' .. env end
  for _, what in ipairs(kinds) do
    local first = redis.call('ZRANGE', run.base .. what, 0, 0, 'WITHSCORES')
    if first[2] then due_at(run, tonumber(first[2])) end
  end
end
