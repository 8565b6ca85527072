-- release: give a group back. `failed` charges an attempt, and the next one starts over. `returned` (shutdown, drain) does not: another
-- replica continues the group. `rejected` means that the group can never succeed: it ends as failed at once.
-- KEYS     the run
-- ARGV     timeline, incarnation, group (its id), token, how (failed, returned, rejected), reason
-- Returns  1
-- Errors   HR_TIMELINE, HR_LEASE_LOST, HR_INVALID
-- uses: _args, _group, _register
register('release', {
  timeline = text, incarnation = text, group = name, token = name, how = one_of({'failed', 'returned', 'rejected'}), reason = text,
}, function(run, call)
  local how, reason = call.how, call.reason
  local group = leased_group(run, call)
  if how == 'rejected' then
    fail(run, group, reason)
  elseif how == 'failed' then
    requeue(run, group, how, true, reason)
  else
    pass_on(run, group, how, reason)
  end
  return 1
end)
