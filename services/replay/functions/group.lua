-- group: read one group and its trajectories, for people.
-- KEYS     the run
-- ARGV     group (its id)
-- Returns  msgpack: state, record (key), the group's fields (of a leased group also silent_s, the time since its last progress), and for
--          each trajectory pushed so far index, key (of its payload), length, oldest, newest, latency_ms and reward once it is scored; for
--          an open group of episodes also begun: index, calls and bytes of each episode that has calls; or nil if the buffer does not know
--          the group
-- Errors   HR_INVALID
-- uses: _args, _group, _register, _steps, _trajectory
register_reader('group', {group = name}, function(run, call)
  local group = load_group(run, call.group)
  if not group then return nil end
  group.state = settled_state(run, group.state, group.step)
  local trajectories, fields = {}, {}
  for i = 0, (group.count or group.n) - 1 do
    local pushed, reward = unpack(redis.call('HMGET', group.key, 'p' .. i, 'r' .. i))
    if pushed then
      local nonce, length, oldest, newest = extent_of(pushed)
      trajectories[#trajectories + 1] = {
        index = i, key = payload_key(run, nonce), length = length, oldest = oldest, newest = newest, latency_ms = latency_of(pushed),
        reward = tonumber(reward or nil),
      }
    end
  end
  for _, field in ipairs({'lane', 'kind', 'order', 'n', 'count', 'dropped', 'saves', 'attempt', 'failures', 'ticket', 'replica', 'pushed',
    'scored', 'oldest', 'newest', 'step', 'reason'}) do
    fields[field] = group[field]
  end
  if group.state == 'open' and group.replica ~= '' and group.moved then fields.silent_s = (run.now - group.moved) / 1000 end
  local begun
  for i = 0, group.kind == 'episodes' and (group.saves or 0) > 0 and group.count - 1 or -1 do
    local nonce, bytes = extent_of(redis.call('HGET', group.key, 'q' .. i))
    begun = begun or {}
    if nonce then begun[#begun + 1] = {i, redis.call('LLEN', payload_key(run, nonce)), bytes} end
  end
  return cmsgpack.pack({
    begun = begun, state = group.state, record = run.base .. 'd:' .. group.record, fields = fields, trajectories = trajectories,
  })
end)
