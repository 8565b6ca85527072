-- evaluated: how validation groups fare.
-- KEYS     the run
-- ARGV     group ids
-- Returns  for each group: state, reason, record key, payload keys in index order (only if evaluated)
-- Errors   HR_INVALID: malformed, or a group that the validation lane does not hold (a rewind drops it)
register('hr_evaluated', nil, function(run, args)
  entries(args, 0, 1, BATCH)
  local reply = {}
  for i, id in ipairs(args) do
    local group = load_group(run, name(id, 'group id'))
    if not group or group.lane ~= 'validation' then
      refuse('HR_INVALID', 'group ' .. id .. ' is not in the validation lane; a rewind drops the lane')
    end
    local keys = {}
    if group.state == 'evaluated' then
      for j, key in ipairs((payload_keys(run, group))) do
        if j % 2 == 1 then keys[#keys + 1] = key end
      end
    end
    reply[i] = {group.state, group.reason or '', run.base .. 'd:' .. group.record, keys}
  end
  return reply
end)
