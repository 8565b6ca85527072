-- make_room: handle a server that is, or was, at its memory limit (see _memory.lua). The replay service calls this every second, and a
-- client that was refused reports it with this call.
-- KEYS     the run
-- ARGV     refused (bytes that the server refused, 0 if none), sheds (groups may be sent back)
-- Returns  bytes that were refused and still don't fit; 0: the run is not full
-- Errors   HR_INVALID
--
-- Payloads of a trained step are dropped first. If there are none, and the trainer waits for groups that can't be stored, the groups with
-- the highest tickets are queued again, without charging an attempt. Those with the lowest tickets, which the trainer waits for, stay.
-- uses: _args, _group, _memory, _register, _run, _steps

-- the most groups that one call sends back
local SHED = 64

-- How many of the lowest tickets the next step still needs, and whether the trainer waits for one of them.
local function needed(run)
  local need = run.prompts_per_step - #step_ids(run, run.next_step)
  if run.staleness_policy ~= 'ordered' then return need, redis.call('ZCARD', run.base .. 'ready') < need end
  local line = need > 0 and redis.call('ZRANGE', run.base .. 'line', 0, need - 1, 'WITHSCORES') or {}
  local last = line[#line]
  return need, need > 0 and (not last or redis.call('ZCOUNT', run.base .. 'ready', '-inf', last) < need)
end

local function shed(run, bytes)
  local need, waits = needed(run)
  if not waits then return end
  local behind = math.min(SHED, redis.call('ZCARD', run.base .. 'line') - need)
  for _, id in ipairs(behind > 0 and redis.call('ZREVRANGE', run.base .. 'line', 0, behind - 1) or {}) do
    if bytes <= 0 then return end
    local group = load_group(run, id)
    if group.actual > 0 or (group.saves or 0) > 0 then
      bytes = bytes - group.actual
      requeue(run, group, 'memory', false, 'the server has reached its maxmemory, and groups before this one could not be stored')
    end
  end
end

register('make_room', {refused = natural, sheds = flag}, function(run, call)
  local refused = math.max(run.full, call.refused)
  if refused == 0 then return 0 end
  local lacks = refused - room_left()
  if lacks <= 0 then refused = 0 end
  if refused ~= run.full then
    set(run, 'full', refused)
    run.ticks = true  -- from here on, time stops or continues
    event(run, 'full', 'bytes', refused)
    wake(run, 'work')
  end
  if lacks > 0 and not evict_trained_step(run) and call.sheds then shed(run, lacks) end
  return refused
end)
