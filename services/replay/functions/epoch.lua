-- epoch: read the newest epoch.
-- KEYS     the run
-- ARGV     none
-- Returns  the epoch, like open_epoch; nil if there was none
-- uses: _epoch, _register
register_reader('epoch', nil, function(run)
  local epoch = load_epoch(run)
  return epoch and reply_epoch(run, epoch)
end)
