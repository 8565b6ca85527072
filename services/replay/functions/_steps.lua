-- Steps: reserved batches, and the groups of them that a rewind keeps.
--
-- `steps` maps a step to its groups. From `freed` to `committed` they are trained and retained, from there to `next_step` reserved, and
-- from there to `top` survivors of a rewind: ready groups that keep their step (law 5). `pinned` counts the latter.
-- uses: _args, _fields, _group, _run, _trajectory

limit('retain_steps', natural)

local function step_ids(run, step)
  return lines(redis.call('HGET', run.base .. 'steps', step))
end

local function keep_step(run, step, ids)
  if #ids > 0 then
    redis.call('HSET', run.base .. 'steps', step, table.concat(ids, '\n'))
  else
    redis.call('HDEL', run.base .. 'steps', step)
  end
end

local function push_ids(run, list, ids)
  for first = 1, #ids, BATCH do
    redis.call('RPUSH', run.base .. list, unpack(ids, first, math.min(first + BATCH - 1, #ids)))
  end
end

-- Delete steps < edge with their groups, a batch at a time (commit.lua).
local function free_steps(run, edge)
  for step = run.freed, edge - 1 do
    push_ids(run, 'trash', step_ids(run, step))
    keep_step(run, step, {})
  end
  if edge > run.freed then set(run, 'freed', edge) end
end

-- Mark steps < version as trained (law 1): the watermark `committed` and the checkpoint's ledger record them. The newest `retain_steps`
-- keep their payloads, for people and for a rewind to an older checkpoint.
local function commit_steps(run, version)
  for step = math.max(run.committed, 0), version - 1 do
    local ids = step_ids(run, step)
    push_ids(run, 'tally', ids)
    move(run, 'train', 'reserved', 'trained', #ids)
    if #ids > 0 then tell(run, 'trained', table.concat(ids, '\n'), {'s', step, 't', run.timeline}) end
  end
  free_steps(run, version - run.retain_steps)
  if version > run.committed then
    set(run, 'committed', version)
    event(run, 'committed', 'version', version)
  end
end

-- The batch of `step`, as `reserve` and `step` return it: step, payload_prefix (of keys), scored and filtered (groups since the previous
-- batch), and for each group its id, attempt and, for its trajectories, indices, pushed (`p<i>`, see _group.lua) and rewards.
local function batch_of(run, step, ids)
  local groups = {}
  for i, id in ipairs(ids) do
    local key = group_key(run, id)
    local head = redis.call('HMGET', key, 'count', 'attempt')
    local count, attempt = tonumber(head[1]), tonumber(head[2])
    local values = redis.call('HMGET', key, unpack(field_names('pr', count)))
    local indices, pushed, rewards, n = {}, {}, {}, 0
    for index = 0, count - 1 do
      if values[index + 1] then
        n = n + 1
        indices[n], pushed[n], rewards[n] = index, values[index + 1], values[count + index + 1]
      end
    end
    groups[i] = {id = id, attempt = attempt, indices = indices, pushed = pushed, rewards = rewards}
  end
  local scored, filtered = unpack(redis.call('HMGET', run.base .. 'since', 'batch_scored', 'batch_filtered'))
  return {
    reply = 'batch', step = step, payload_prefix = payload_key(run, ''), groups = groups, scored = tonumber(scored or 0),
    filtered = tonumber(filtered or 0),
  }
end

-- A group's hash still says `reserved` after its step is committed: nothing writes to it again.
local function settled_state(run, state, step)
  return state == 'reserved' and step < run.committed and 'trained' or state
end
