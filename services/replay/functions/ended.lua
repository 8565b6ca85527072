-- ended: train groups that ended without being trained, for the trainer's checkpoint.
-- KEYS     the run
-- ARGV     none
-- Returns  groups failed, groups filtered, bitmap of the orders of both (the most significant bit of the first byte is order 0)
-- Errors   HR_UNAVAILABLE: no such run
register_reader('hr_ended', 0, function(run)
  local failed, filtered = unpack(redis.call('HMGET', run.base .. 'counts', 'train:failed', 'train:filtered'))
  return {tonumber(failed or 0), tonumber(filtered or 0), redis.call('GET', run.base .. 'ended') or ''}
end)
