-- release: a replica gives a group back. `failed` costs an attempt, and the next one starts over. `returned` (shutdown, drain) does not:
-- another replica goes on with it. `rejected` says that the group can never succeed: it ends as failed at once.
-- KEYS     the run
-- ARGV     timeline, incarnation, group id, token, how (failed, returned, rejected), reason
-- Returns  1
-- Errors   HR_TIMELINE, HR_LEASE_LOST, HR_INVALID
register('hr_release', 6, function(run, args)
  local id, token = name(args[3], 'group id'), name(args[4], 'token')
  local how = choice(args[5], {failed = true, returned = true, rejected = true}, 'how')
  require_timeline(run, args[1])
  require_incarnation(run, args[2])
  local group = leased_group(run, id, token)
  if how == 'rejected' then
    fail(run, group, args[6])
  elseif how == 'failed' then
    requeue(run, group, how, true, args[6])
  else
    pass_on(run, group, how, false, args[6])
  end
  return 1
end)
