-- reserve: give the trainer the batch of the next step, or let it wait. The batch has the groups that a rewind kept for the step. Under
-- `ordered` the lowest tickets follow, all of which must be ready; under `drop` and `mask`, the lowest tickets among those that are ready.
-- KEYS     the run
-- ARGV     client (the trainer), number (of this client's call, higher than any before), step, timeline
-- Returns  msgpack, by its `reply`: `batch` (see batch_of in _steps.lua); `waiting` with ready and needed; `end` with unused
-- Errors   HR_TIMELINE, HR_STEP, HR_STARVED, HR_BROKEN (it would wait for an environment that has been broken for longer than its
--          `give_up_after`), HR_INVALID
--
-- No step is taken while the run wants a refill: a refill that is delivered twice would bring back what was trained in between (law 1).
--
-- Repeating the last reserve returns the same batch, for a trainer that lost the reply. A call that arrives again, or late, takes none: it
-- waits. Whatever the admission policy did, law 2 (age) and law 3 (completeness) are enforced here: a group that breaks one is requeued,
-- never handed out. The end of the run waits for what a broken environment still has to score.
-- uses: _args, _group, _register, _run, _scoring, _steps

-- Law 2: a group is as old as its oldest token. Under `mask`, the trainer leaves single tokens over age out of the policy loss, and the
-- group stays as long as it has a token that counts.
local function age_of(run, group, step)
  return step - (run.staleness_policy == 'mask' and group.newest or group.oldest)
end

local JUDGED = {'n', 'count', 'pushed', 'scored', 'oldest', 'newest', 'ticket'}

-- Why the group may not be trained at `step`, or nil.
local function objection(run, group, step)
  if group.pushed ~= group.n or group.scored ~= group.n then return 'incomplete' end
  if age_of(run, group, step) > run.max_age then return 'over_age' end
  if group.newest > step then return 'too_new' end
  local keys = payload_keys(run, group)
  if #keys ~= 2 * group.n or redis.call('EXISTS', unpack(keys)) ~= #keys then return 'payload_missing' end
end

-- Survivors of a rewind that wait for this step. One that breaks a law leaves, so that the batch has one more hole.
local function pinned_groups(run, step)
  local kept, ids = {}, {}
  for _, id in ipairs(step_ids(run, step)) do
    local group = load_group(run, id, JUDGED)
    local why = objection(run, group, step)
    if why then
      requeue(run, load_group(run, id), why, false, 'step ' .. step .. ': ' .. why)
      set(run, 'pinned', run.pinned - 1)
    else
      kept[#kept + 1], ids[#ids + 1] = group, id
    end
  end
  return kept, ids
end

-- If the queue is closed and the groups left in line can't fill the holes, survivors of the last steps give up their step.
local function unpin_last_step(run, step)
  for last = run.top - 1, step + 1, -1 do
    local ids = step_ids(run, last)
    if #ids > 0 then
      for _, id in ipairs(ids) do
        local ticket = redis.call('HGET', group_key(run, id), 'ticket')
        redis.call('ZADD', run.base .. 'line', ticket, id)
        redis.call('ZADD', run.base .. 'ready', ticket, id)
        redis.call('HDEL', group_key(run, id), 'step')
      end
      keep_step(run, last, {})
      set(run, 'pinned', run.pinned - #ids)
      return true
    end
  end
  return false
end

local function end_run(run, left)
  local base = run.base
  for _, source in ipairs({'line', 'queue'}) do
    for _, id in ipairs(redis.call('ZRANGE', base .. source, 0, -1)) do left[#left + 1] = id end
  end
  for step = run.next_step, run.top - 1 do
    for _, id in ipairs(step_ids(run, step)) do left[#left + 1] = id end
    keep_step(run, step, {})
  end
  set(run, 'pinned', 0)
  for _, id in ipairs(left) do
    local group = load_group(run, id)
    leave(run, group)
    discard(run, group)
    redis.call('HSET', group.key, 'state', 'unused', 'token', '', 'held', 0)
    redis.call('SADD', base .. 'unused', id)
    move(run, 'train', group.state, 'unused')
  end
  if #left > 0 then
    event(run, 'ended', 'step', run.next_step, 'unused', #left)
    tell(run, 'unused', table.concat(left, '\n'))
  end
  return {reply = 'end', unused = redis.call('SCARD', base .. 'unused')}
end

-- Append the groups in `ids` that may be trained at `step` to `groups`. Requeue the others.
local function take_lawful(run, step, ids, groups)
  for _, id in ipairs(ids) do
    local group = load_group(run, id, JUDGED)
    local why = objection(run, group, step)
    if why then
      requeue(run, load_group(run, id), why, false, 'step ' .. step .. ': ' .. why)
    else
      groups[#groups + 1] = group
    end
  end
end

-- Ready groups, lowest tickets first, until `need` are found. If there are too few: nil, and how many there are. A group over age leaves
-- the line here; admission bounds how many of them there can be.
local function any_ready(run, step, need)
  local groups = {}
  while #groups < need do
    local ids = redis.call('ZRANGE', run.base .. 'ready', #groups, need - 1)
    if #ids == 0 then return nil, #groups end
    take_lawful(run, step, ids, groups)
  end
  return groups, need
end

-- The groups with the `need` lowest tickets if all are ready and break no law, else nil and how many are ready.
local function lowest(run, step, need)
  if need == 0 then return {}, 0 end
  local line = redis.call('ZRANGE', run.base .. 'line', 0, need - 1, 'WITHSCORES')
  local last = line[#line]
  local ready = last and redis.call('ZCOUNT', run.base .. 'ready', '-inf', last) or 0
  if ready < need then return nil, ready end
  local ids, groups = {}, {}
  for i = 1, #line, 2 do ids[#ids + 1] = line[i] end
  take_lawful(run, step, ids, groups)
  if #groups < need then return nil, #groups end
  return groups, need
end

local function hand_out(run, step, groups)
  table.sort(groups, function(a, b) return a.ticket < b.ticket end)
  local ids, age, oldest = {}, 0, 0
  for i, group in ipairs(groups) do
    ids[i] = group.id
    redis.call('HSET', group.key, 'state', 'reserved', 'step', step)
    age, oldest = age + step - group.oldest, math.max(oldest, step - group.oldest)
  end
  for first = 1, #ids, BATCH do
    local last = math.min(first + BATCH - 1, #ids)
    redis.call('ZREM', run.base .. 'line', unpack(ids, first, last))
    redis.call('ZREM', run.base .. 'ready', unpack(ids, first, last))
  end
  keep_step(run, step, ids)
  move(run, 'train', 'ready', 'reserved', #ids)
  tell(run, 'reserved', table.concat(ids, '\n'), {'s', step, 't', run.timeline})
  set(run, 'next_step', step + 1)
  if run.top < step + 1 then set(run, 'top', step + 1) end
  redis.call('HSET', run.key, 'age_mean', age / #ids, 'age_max', oldest)
  local scored, filtered = unpack(redis.call('HMGET', run.base .. 'since', 'scored', 'filtered'))
  redis.call('HSET', run.base .. 'since', 'scored', 0, 'filtered', 0, 'batch_scored', scored or 0, 'batch_filtered', filtered or 0)
  event(run, 'reserved', 'step', step)
  if run.short == 1 then wake(run, 'work') end  -- the payloads of the step before may go now (_memory.lua)
  return batch_of(run, step, ids)
end

limit('max_scored_per_step', natural)  -- 0: none

-- Refuse if dynamic sampling has reached its limit: more than `max_scored_per_step` groups got their scores since the last batch, and there
-- are still fewer than `need` groups that may be trained. Ready groups that only wait for their turn don't count towards the limit.
local function require_signal(run, need)
  if run.max_scored_per_step == 0 or redis.call('ZCARD', run.base .. 'ready') >= need then return end
  local scored, filtered = unpack(redis.call('HMGET', run.base .. 'since', 'scored', 'filtered'))
  if tonumber(scored or 0) > run.max_scored_per_step then
    refuse('HR_STARVED', scored .. ' groups were scored for one batch, more than ' .. run.max_scored_per_step .. ', and ' ..
      (filtered or 0) .. ' of them were filtered: all their rewards are equal')
  end
end

-- Whether something waits for a broken environment. Refuses the call if one has been broken for too long.
local function waits_for_environment(run)
  local broken, waits = redis.call('ZRANGE', run.base .. 'broken', 0, -1, 'WITHSCORES'), false
  for i = 1, #broken, 2 do
    local env, broken_ms = broken[i], run.now - broken[i + 1]
    local longest = setting_of(run, env).give_up_ms
    if longest and broken_ms >= longest then
      refuse('HR_BROKEN', 'environment ' .. env .. ' has been broken for ' .. math.floor(broken_ms / 1000) .. ' s (env.' .. env ..
        '.give_up_after): ' .. redis.call('HGET', environment_key(run, env), 'message'))
    end
    waits = waits or awaits_score(run, env)
  end
  return waits
end

local function reserve(run, call)
  local step = call.step
  -- a trained step whose payloads were dropped for room is the newest again once the step after it was rejected
  if step == run.next_step - 1 and step >= math.max(run.committed, run.evicted) then
    local ids = step_ids(run, step)
    if #ids > 0 then return batch_of(run, step, ids) end
  end
  if step ~= run.next_step then
    refuse('HR_STEP', 'reserve of step ' .. step .. '; the next step is ' .. run.next_step)
  end
  if made_before(run, 'reserve', call) or run.refill == 1 then return {reply = 'waiting', ready = 0, needed = run.prompts_per_step} end
  local groups, ids = pinned_groups(run, step)
  keep_step(run, step, ids)
  local survivors = #groups
  local need = run.prompts_per_step - survivors
  if run.closed == 1 then
    local queued = redis.call('ZCARD', run.base .. 'queue') + redis.call('ZCARD', run.base .. 'wanted')
    if queued + redis.call('ZCARD', run.base .. 'line') + run.pinned < run.prompts_per_step then
      if not waits_for_environment(run) then return end_run(run, {}) end
      return {reply = 'waiting', ready = survivors, needed = run.prompts_per_step}
    end
    while queued + redis.call('ZCARD', run.base .. 'line') < need and unpin_last_step(run, step) do end
  end
  local choose = run.staleness_policy == 'ordered' and lowest or any_ready
  local fresh, ready = choose(run, step, need)
  if not fresh then
    require_signal(run, need)
    waits_for_environment(run)
    return {reply = 'waiting', ready = survivors + ready, needed = run.prompts_per_step}
  end
  for _, group in ipairs(fresh) do groups[#groups + 1] = group end
  if survivors > 0 then set(run, 'pinned', run.pinned - survivors) end
  return hand_out(run, step, groups)
end

register('reserve', {client = name, number = positive, step = natural, timeline = text}, function(run, call)
  require_timeline(run, call.timeline)
  return cmsgpack.pack(reserve(run, call))
end)
