-- group: one group and its trajectories, for people.
-- KEYS     the run
-- ARGV     group id
-- Returns  state, record key, the group's fields and values, and for each trajectory pushed so far: index, payload key,
--          `p<i>`, reward ('' before it is scored), or nil if the buffer does not know the group
-- Errors   HR_INVALID
register_reader('hr_group', 1, function(run, args)
  local group = load_group(run, name(args[1], 'group id'))
  if not group then return nil end
  group.state = settled_state(run, group.state, group.step)
  local trajectories, fields = {}, {}
  for i = 0, (group.count or group.n) - 1 do
    local pushed, reward = unpack(redis.call('HMGET', group.key, 'p' .. i, 'r' .. i))
    if pushed then
      for _, value in ipairs({i, run.base .. 'p:' .. string.match(pushed, '^%S+'), pushed, reward or ''}) do
        trajectories[#trajectories + 1] = value
      end
    end
  end
  for _, field in ipairs({'lane', 'order', 'n', 'count', 'dropped', 'saves', 'attempt', 'failures', 'ticket', 'replica', 'pushed', 'scored', 'oldest',
    'newest', 'step', 'reason'}) do
    if group[field] then fields[#fields + 1], fields[#fields + 2] = field, group[field] end
  end
  return {group.state, run.base .. 'd:' .. group.record, fields, trajectories}
end)
