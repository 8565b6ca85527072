-- Memory: what is dropped first when it runs short, and the server's own limit.
--
-- A server that has reached its `maxmemory` refuses what would add data: `enqueue`, `lease`, `push`, `save` and payloads that are staged.
-- The refused client reports this (make_room). The run is then `full` by the refused bytes, until they would fit or Redis accepts something
-- again. While the run is full its time stands still (`tell_time` in _run.lua), so that nobody is charged for waiting.
-- uses: _group, _meter, _run

-- Steps before the newest reserved one are trained. Their payloads only serve people and a rewind, which can have them generated again. The
-- oldest are dropped first: payloads that are merely retained before those that a crash would need.
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

-- Bytes that the server can still accept; negative beyond its limit.
local function room_left()
  local info = redis.call('INFO', 'memory')
  local function figure(field) return tonumber(string.match(info, field .. ':(%d+)') or 0) end
  local most = figure('maxmemory')
  if most == 0 then return math.huge end
  return most - figure('used_memory') + figure('mem_not_counted_for_evict')
end
