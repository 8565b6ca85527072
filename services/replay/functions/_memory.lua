-- Memory: what goes first when it is short, and the server's own limit.
--
-- A server with a `maxmemory` refuses what would fill it once that is reached: `enqueue`, `lease`, `push`, `save` and payloads that are staged. The
-- client that was refused reports it (make_room), and the run is `full` by the bytes that were refused, until they would fit or Redis lets something
-- in again. While it is full its time stands still (`tell_time` in _run.lua): nobody is charged for waiting.
-- uses: _group, _meter, _run

-- Steps before the newest reserved one are trained; their payloads only serve people and a rewind, which can have them made again.
-- The oldest go first, so that those that are merely retained go before those that a crash would need.
local function evict_trained_step(run)
  local step = math.max(run.evicted, run.freed)
  if step >= math.max(run.committed, run.next_step - 1) then return false end
  for _, id in ipairs(lines(redis.call('HGET', run.base .. 'steps', step))) do
    local group = load_group(run, id)
    meter_trained(run, group)
    discard(run, group)
    redis.call('HSET', group.key, 'held', 0, 'lost', 1)
  end
  set(run, 'evicted', step + 1)
  event(run, 'evicted', 'step', step)
  return true
end

-- Bytes that the server may still take; negative past its limit.
local function room_left()
  local info = redis.call('INFO', 'memory')
  local function figure(field) return tonumber(string.match(info, field .. ':(%d+)') or 0) end
  local most = figure('maxmemory')
  if most == 0 then return math.huge end
  return most - figure('used_memory') + figure('mem_not_counted_for_evict')
end
