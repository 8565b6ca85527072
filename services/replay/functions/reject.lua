-- reject: give back the newest step's batch, because parts of it can't be trained on. The step, on which nothing was trained yet, is
-- reopened as by a rewind to it: its other groups keep it, and the named ones are generated again, each at the cost of an attempt.
-- KEYS     the run
-- ARGV     step, timeline, nonce (of this rejection), reason, groups (of the step, each with id and attempt, at least one)
-- Returns  1
-- Errors   HR_TIMELINE; HR_STEP: the step is not the newest reserved one, or is trained (committed, or weights of a later version were
--          announced or offered), or its payloads were dropped, or it does not hold one of the groups in that attempt; HR_INVALID
--
-- A repeat under the newest nonce is a no-op. An older one, however late, names attempts that are over, and is refused. Leases and the
-- groups of later steps stay as they are.
-- uses: _args, _epoch, _group, _register, _run, _steps

-- The newest version of the weights that replicas know of: the steps below it are trained. Taken back, such a step would wait for ever for
-- groups that later weights wrote (law 2), and they for room.
local function newest_weights(run)
  local epoch = load_epoch(run)
  local announced = epoch and epoch.timeline == run.timeline and epoch.version or 0
  return math.max(announced, tonumber(redis.call('HGET', run.base .. 'offer', 'version') or 0))
end

local function named_groups(run, step, entries)
  local of_step, rejected = {}, {}
  for _, id in ipairs(step_ids(run, step)) do of_step[id] = true end
  for _, entry in ipairs(entries) do
    local id, attempt = name(entry.id, 'the id of a group'), positive(entry.attempt, 'the attempt of a group')
    local group = of_step[id] and load_group(run, id)
    if not group or group.attempt ~= attempt then
      refuse('HR_STEP', 'step ' .. step .. ' does not hold attempt ' .. attempt .. ' of group ' .. id)
    end
    rejected[id] = true
  end
  return rejected
end

register('reject', {
  step = natural, timeline = text, nonce = name, reason = text, groups = list_of(map, BATCH),
}, function(run, call)
  local step, rejected = call.step, run.base .. 'rejected'
  require_timeline(run, call.timeline)
  if #call.groups == 0 then refuse('HR_INVALID', 'the rejection of step ' .. step .. ' names no group') end
  if redis.call('GET', rejected) == call.nonce then return 1 end
  -- a step below `evicted` was trained, and the payloads of its other groups are gone
  local oldest = math.max(run.committed, run.evicted, newest_weights(run), 0)
  if step ~= run.next_step - 1 or step < oldest then
    refuse('HR_STEP', 'rejection of step ' .. step .. '; the steps from ' .. oldest .. ' to ' .. run.next_step - 1 ..
      ' are reserved and not trained')
  end
  local to_reject, kept, ids = named_groups(run, step, call.groups), {}, {}
  for id in pairs(to_reject) do ids[#ids + 1] = id end
  table.sort(ids)
  tell(run, 'rejected', table.concat(ids, '\n'), {'s', step}, call.reason)
  for _, id in ipairs(step_ids(run, step)) do
    local group = load_group(run, id)
    if to_reject[id] then
      requeue(run, group, 'invariant', true, call.reason)
    else
      redis.call('HSET', group.key, 'state', 'ready')
      move(run, 'train', 'reserved', 'ready')
      kept[#kept + 1] = id
    end
  end
  if #kept > 0 then tell(run, 'ready', table.concat(kept, '\n')) end
  keep_step(run, step, kept)
  set(run, 'pinned', run.pinned + #kept)
  set(run, 'next_step', step)
  redis.call('UNLINK', run.base .. 'since')
  redis.call('SET', rejected, call.nonce)
  event(run, 'rejected', 'step', step, 'reason', words(call.reason))
  return 1
end)
