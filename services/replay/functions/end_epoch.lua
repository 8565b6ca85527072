-- end_epoch: the transfer is over; members that did not verify stay STALE.
-- KEYS     the run
-- ARGV     epoch, aborted (0/1)
-- Returns  the epoch, as open_epoch. An epoch that is over stays as it ended.
-- Errors   HR_FENCED, HR_TIMELINE, HR_INVALID (done without a transfer)
register('hr_end_epoch', 2, function(run, args)
  local id = name(args[1], 'epoch')
  local state = choice(args[2], {['0'] = true, ['1'] = true}, 'aborted') == '1' and 'aborted' or 'done'
  local epoch = require_epoch(run, id, {announced = true, transfer = true, done = true, aborted = true})
  if epoch.state == 'done' or epoch.state == 'aborted' then return reply_epoch(run, epoch) end
  if epoch.state == 'announced' and state == 'done' then
    refuse('HR_INVALID', 'epoch ' .. id .. ' has not begun; it can only be aborted')
  end
  set_state(run, epoch, state)
  return reply_epoch(run, epoch)
end)
