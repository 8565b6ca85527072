-- groups: list the groups in the buffer, a page at a time, for people. A group that moves meanwhile may appear twice, or not at all.
-- KEYS     the run
-- ARGV     place (queue, line: open, scoring or ready; steps: kept for, reserved for or retained of a step; failed; unused; lane: the
--          validation lane), cursor (0 at first)
-- Returns  msgpack: cursor (the next one; -1: there is no more), groups (id and state of each)
-- Errors   HR_INVALID
--
-- A page is BATCH groups, or one step.
-- uses: _args, _group, _register, _steps

local function page_of_steps(run, cursor)
  local step = math.max(cursor, run.freed)
  while step < run.top do
    local ids = step_ids(run, step)
    if #ids > 0 then return step + 1, ids end
    step = step + 1
  end
  return -1, {}
end

local function page_of_set(key, cursor)
  local next_cursor, ids = unpack(redis.call('SSCAN', key, cursor, 'COUNT', BATCH))
  return next_cursor == '0' and -1 or tonumber(next_cursor), ids
end

local function page_of_line(key, cursor)
  local ids = redis.call('ZRANGE', key, cursor, cursor + BATCH - 1)
  return #ids < BATCH and -1 or cursor + BATCH, ids
end

register_reader('groups', {
  place = one_of({'queue', 'line', 'steps', 'failed', 'unused', 'lane'}), cursor = natural,
}, function(run, call)
  local place, cursor = call.place, call.cursor
  local next_cursor, ids
  if place == 'steps' then
    next_cursor, ids = page_of_steps(run, cursor)
  elseif place == 'unused' or place == 'lane' then
    next_cursor, ids = page_of_set(run.base .. place, cursor)
  else
    next_cursor, ids = page_of_line(run.base .. place, cursor)
  end
  local groups = {}
  for _, id in ipairs(ids) do
    local state, step = unpack(redis.call('HMGET', group_key(run, id), 'state', 'step'))
    if state then
      groups[#groups + 1] = {id, settled_state(run, state, tonumber(step or nil))}
    end
  end
  return cmsgpack.pack({cursor = next_cursor, groups = groups})
end)
