-- epoch: the newest one.
-- KEYS     the run
-- ARGV     none
-- Returns  the epoch, as open_epoch; nil if there was none
register_reader('hr_epoch', 0, function(run)
  local epoch = load_epoch(run)
  return epoch and reply_epoch(run, epoch)
end)
