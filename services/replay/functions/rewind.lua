-- rewind: let the trainer continue from checkpoint `version` on a new timeline. Atomic; a repeat under the same timeline is a no-op.
-- KEYS     the run
-- ARGV     version, timeline (a new nonce)
-- Returns  the run's state, msgpack
-- Errors   HR_STEP: the buffer lost the steps that led to the checkpoint; HR_TIMELINE: this timeline has ended; HR_INVALID
--
-- Commits reserved steps < version. For a checkpoint older than the newest, it instead takes back what was committed since: `committed`
-- becomes `version` again, and the run wants a `refill` of the groups that it no longer holds. Reopens steps >= version: groups without a
-- token newer than `version` keep their step, and the others are requeued (law 2: the new weights do not descend from those that wrote
-- them). Voids scoring tokens and all leases but those that can go on, drops the validation lane, returns leftovers to the queue and opens
-- it. Replicas become STALE automatically, because HEALTHY belongs to a timeline.
--
-- A lease goes on if its replica holds verified weights from which those of `version` descend: then what was sampled under it, handed in
-- or not, is of these. A transfer that has begun would have made the replica STALE. What it samples under weights that it has pulled, it
-- hands in after `verify`, which refuses the old timeline. A lease of episodes goes on if it allows weights of `version`: its programs have
-- seen only what was appended, and what others sample for them is judged when it is (_episode.lua). So a trainer that comes back with its
-- newest weights interrupts nothing: its replicas get these weights again, as in a late refit.
--
-- Its work is bounded by what admission allows in flight, the steps since the last commit or retained, and one validation.
-- uses: _args, _fields, _fleet, _group, _register, _run, _scoring, _steps, _trajectory, _validation

-- The oldest weights that the lease of the open group allows from now on; infinite if it can't go on.
local function oldest_weights(run, group)
  if group.kind == 'episodes' then return group.replica ~= '' and tonumber(redis.call('HGET', group.key, 'version')) or math.huge end
  local state, timeline, held = unpack(redis.call('HMGET', replica_key(run, group.replica), 'state', 'timeline', 'version'))
  return not group.kind and state_of(run, state, timeline) == 'HEALTHY' and tonumber(held) or math.huge
end

-- Whether the open group's holder goes on with it under the lease that it has.
local function goes_on(run, group, version)
  if oldest_weights(run, group) > version then return false end
  local saved = (group.saves or 0) > 0 and redis.call('HMGET', group.key, unpack(field_names_of(group, 'q'))) or {}
  for _, value in ipairs(saved) do
    local _, _, _, newest = extent_of(value)
    if newest and newest > version then return false end  -- it continues what a replica before it began under later weights
  end
  return (group.newest or 0) <= version
end

local function survives(run, group, version)
  if group.state == 'open' then return goes_on(run, group, version) end
  return group.newest <= version and not group.lost
end

-- Trained steps >= version no longer count as trained. Those that are still held become reserved, to be reopened. The others must be
-- refilled.
local function take_back_steps(run, version)
  local held = 0
  for step = math.max(version, run.freed), run.committed - 1 do held = held + #step_ids(run, step) end
  move(run, 'train', 'trained', 'reserved', held)
  move(run, 'train', 'trained', nil, (run.committed - version) * run.prompts_per_step - held)
  set(run, 'committed', version)
  set(run, 'refill', 1)
end

local function reopen_steps(run, version)
  local pinned, top = 0, version
  for step = math.max(version, run.freed), run.top - 1 do
    local kept, reopened = {}, {}
    for _, id in ipairs(step_ids(run, step)) do
      local group = load_group(run, id)
      if survives(run, group, version) then
        if group.state == 'reserved' then
          redis.call('HSET', group.key, 'state', 'ready')
          move(run, 'train', 'reserved', 'ready')
          reopened[#reopened + 1] = id
        end
        kept[#kept + 1] = id
      else
        requeue(run, group, 'rewind', false, 'rewind to version ' .. version)
      end
    end
    if #reopened > 0 then tell(run, 'ready', table.concat(reopened, '\n')) end
    keep_step(run, step, kept)
    pinned = pinned + #kept
    if #kept > 0 then top = step + 1 end
  end
  set(run, 'pinned', pinned)
  set(run, 'top', top)
  set(run, 'freed', math.min(run.freed, version))
end

-- Put groups that were passed over back into the queue, in their order.
local function lose_place(run, group)
  leave(run, group)
  hold(run, group, 0)
  redis.call('HSET', group.key, 'held', 0)
  redis.call('ZADD', queue_of(run, group.lane, group.kind), group.order, group.id)
end

local function sift_line(run, version)
  for _, id in ipairs(redis.call('ZRANGE', run.base .. 'line', 0, -1)) do
    local group = load_group(run, id)
    if group.state == 'queued' then
      lose_place(run, group)
    elseif not survives(run, group, version) then
      requeue(run, group, 'rewind', false, 'rewind to version ' .. version)
    end
  end
end

-- Law 4: a score under a token of the old timeline is refused.
local function void_scoring(run)
  while void_taken(run) > 0 do end
end

local function reopen_leftovers(run)
  for _, id in ipairs(redis.call('SMEMBERS', run.base .. 'unused')) do
    requeue(run, load_group(run, id), 'rewind', false, 'the run continues')
  end
  redis.call('UNLINK', run.base .. 'unused')
end

register('rewind', {version = natural, timeline = name}, function(run, call)
  local version, timeline = call.version, call.timeline
  if timeline == run.timeline then return cmsgpack.pack(run_state(run)) end
  require_unused(run, timeline)
  if version > run.next_step then
    refuse('HR_STEP', 'rewind to version ' .. version .. ', but only steps below ' .. run.next_step ..
      ' were reserved here: the buffer lost writes; use restore')
  end
  if version < run.committed then take_back_steps(run, version) else commit_steps(run, version) end
  drop_validation(run, 1e6, math.huge)
  reopen_steps(run, version)
  sift_line(run, version)
  void_scoring(run)
  reopen_leftovers(run)
  if redis.call('EXISTS', run.base .. 'epoch') == 1 then redis.call('HSET', run.base .. 'epoch', 'state', 'aborted') end
  set(run, 'evicted', math.min(run.evicted, version))
  set(run, 'next_step', version)
  set(run, 'closed', 0)
  set(run, 'validation', 0)
  redis.call('UNLINK', run.base .. 'since', run.base .. 'epochs', run.base .. 'validators')
  retire(run, run.timeline)
  set(run, 'timeline', timeline)
  begin_timeline(run, version, timeline)
  event(run, 'rewound', 'version', version, 'timeline', timeline)
  tell(run, 'rewound', '', {'v', version, 't', timeline})
  for _, channel in ipairs({'work', 'ready', 'epoch'}) do wake(run, channel) end
  return cmsgpack.pack(run_state(run))
end)
