-- end_epoch: end the transfer. Members that did not verify stay STALE.
-- KEYS     the run
-- ARGV     epoch, aborted
-- Returns  the epoch, like open_epoch. An epoch that is over stays as it ended.
-- Errors   HR_FENCED, HR_TIMELINE, HR_INVALID (done without a transfer)
-- uses: _args, _epoch, _register
register('end_epoch', {epoch = name, aborted = flag}, function(run, call)
  local id, state = call.epoch, call.aborted and 'aborted' or 'done'
  local epoch = require_epoch(run, id, {announced = true, transfer = true, done = true, aborted = true})
  if epoch.state == 'done' or epoch.state == 'aborted' then return reply_epoch(run, epoch) end
  if epoch.state == 'announced' and state == 'done' then
    refuse('HR_INVALID', 'epoch ' .. id .. ' has not begun; it can only be aborted')
  end
  set_state(run, epoch, state)
  return reply_epoch(run, epoch)
end)
