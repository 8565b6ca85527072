-- abandon: a replica can't generate one trajectory of its lease. If others were started beyond n, the group does without it. Otherwise the
-- whole group goes back, and an attempt is charged.
-- KEYS     the run
-- ARGV     timeline, incarnation, group (its id), token, index, reason
-- Returns  1: the lease continues without it; 0: the group is no longer the caller's
-- Errors   HR_TIMELINE, HR_LEASE_LOST, HR_INVALID
-- uses: _args, _group, _register
register('abandon', {
  timeline = text, incarnation = text, group = name, token = name, index = natural, reason = text,
}, function(run, call)
  local id, index = call.group, call.index
  local group = leased_group(run, call)
  if index >= group.count then
    refuse('HR_INVALID', 'index ' .. index .. ' of group ' .. id .. ', which has ' .. group.count .. ' trajectories')
  end
  local pushed, dropped = unpack(redis.call('HMGET', group.key, 'p' .. index, 'x' .. index))
  if pushed or dropped then return 1 end
  if group.dropped >= group.count - group.n then
    requeue(run, group, 'failed', true, call.reason)
    return 0
  end
  do_without(run, group, index, call.reason)
  return 1
end)
