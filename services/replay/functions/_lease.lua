-- Leases, as replicas (lease.lua) and runners (lease_episodes.lua) take them.
--
-- Order: first groups whose lease was lost (_continuation.lua), then validation, then the lowest orders that admission and memory allow
-- (_admission.lua). Suspects come before everything else (_suspects.lua). What makes a lease wait, and what is exempt from it, is in the
-- headers of these files and here.
--
-- Shares: a replica that got less than it asked for waits. While others wait, a replica gets at most its share: what can be leased now,
-- plus what it and the waiting replicas already hold, divided equally among them. Otherwise the first to ask would take everything that
-- admission allows, and the others would generate nothing.
--
-- A replica that pulls gets each version later than others, which would by then have leased all that admission opened with it. So while it
-- waits, admission goes by its weights for all: nobody begins what they are too old for. Work may begin under them, so the groups of the
-- next step are admitted whatever else is in line, and the trainer never waits for it (law 6). Once its weights are too old, it waits no
-- more.
--
-- Validators, the replicas that validate beside training, lease the groups of the validation and nothing else: training groups would keep
-- them from their next refit. So the trainer leaves at least one other replica, and ends the validation if no other can train (its only
-- exemption: no group that the trainer waits for can be leased by validators alone).
--
-- Until a refill is complete, no training prompt is leased: the missing prompts come before those in the queue (law 5).
-- uses: _admission, _args, _continuation, _fleet, _group, _run, _suspects

limit('ahead_steps', natural)

-- How many train groups admission lets a replica with weights of this version have in line.
local function bound_of(run, version)
  return (version + run.reach + 1 - run.next_step) * run.prompts_per_step - run.pinned
end

-- What there is to lease while so many train groups may be in line.
local function count_there(run, bound)
  local room = run.refill == 0 and bound - redis.call('ZCARD', run.base .. 'line') or 0
  local there = math.min(math.max(room, 0), redis.call('ZCARD', queue_of(run, 'train')))
  for _, key in ipairs({of_kind(run, 'orphans'), queue_of(run, 'validation'), of_kind(run, 'passed')}) do
    there = there + redis.call('ZCARD', key)
  end
  return there
end

-- The most groups that this replica may get, so that waiting replicas get as many, and the version whose admission goes for it.
local function share_of(run, taker)
  -- what a thousand waiting replicas find most often: they are not asked, and none of them gets anything
  if count_there(run, bound_of(run, taker.version)) == 0 and redis.call('EXISTS', run.base .. 'broken') == 0 then
    return taker.most, taker.version
  end
  local mine = redis.call('SCARD', run.base .. 'h:' .. taker.holder)
  local waiting, held, oldest = 0, mine, taker.version
  for _, id in ipairs(redis.call('SMEMBERS', run.base .. 'waiting')) do
    local state, timeline, version, pulls =
      unpack(redis.call('HMGET', replica_key(run, id), 'state', 'timeline', 'version', 'pulls'))
    version, pulls = tonumber(version), pulls == '1'
    if id ~= taker.holder and state_of(run, state, timeline) == 'HEALTHY' and (not pulls or may_work_under(run, version)) then
      waiting, held = waiting + 1, held + redis.call('SCARD', run.base .. 'h:' .. id)
      if pulls then oldest = math.min(oldest, version) end
    end
  end
  if waiting == 0 then return taker.most, taker.version end
  -- at least one, for a broken environment's probe: the replica that holds the fewest can always take it
  local share = math.ceil((math.max(count_there(run, bound_of(run, oldest)), 1) + held) / (waiting + 1))
  return math.min(taker.most, math.max(0, share - mine)), oldest
end

-- The taker's leases, in the form of a reply.
local function lease_to(run, taker)
  local asked, apart, admitted = taker.most, set_apart(run, taker), taker.version
  if apart then
    taker.most = 0
  elseif not taker.kind then
    taker.most, admitted = share_of(run, taker)
  end
  local bound = bound_of(run, admitted)
  if taker.most > 0 then hand_on(run, taker) end
  -- most groups have neither
  local any = taker.most > 0 and redis.call('EXISTS', run.base .. 'broken', of_kind(run, 'passed', taker.kind)) > 0
  taker.any_broken = any and redis.call('EXISTS', run.base .. 'broken') == 1
  if taker.most > 0 then lease_from(run, 'validation', taker, math.huge) end
  if taker.most > 0 and taker.kind ~= 'validators' and run.refill == 0 and (not any or lease_passed(run, taker, bound)) then
    local room = bound - redis.call('ZCARD', run.base .. 'line')
    lease_from(run, 'train', taker, room > 0 and room or room_for_probe(run, taker))
  end
  local waits = not apart and #taker.leases < asked and (not taker.pulls or may_work_under(run, taker.version))
  if not taker.kind then redis.call(waits and 'SADD' or 'SREM', run.base .. 'waiting', taker.holder) end
  return {timeline = run.timeline, incarnation = run.incarnation, leases = taker.leases}
end

-- A repeat of a member's newest call gets the same answer, and grants nothing more. An earlier call is refused, because nobody would
-- receive what it is granted. `lease` answers a new call.
local function answer_lease(run, call, holder, lease)
  local key = replica_key(run, holder)
  local newest, before = unpack(redis.call('HMGET', key, 'leased', 'answer'))
  if call.number == tonumber(newest or 0) and before ~= '' then return before end
  if call.number <= tonumber(newest or 0) then
    refuse('HR_FENCED', 'lease ' .. call.number .. ' of ' .. who(holder) .. ' was answered before')
  end
  if redis.call('EXISTS', key) == 1 then redis.call('HSET', key, 'leased', call.number, 'answer', '') end
  local reply = cmsgpack.pack(lease())
  redis.call('HSET', key, 'answer', reply, 'together', redis.call('SCARD', run.base .. 'h:' .. holder))
  return reply
end
