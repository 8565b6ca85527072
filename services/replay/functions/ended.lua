-- ended: list the train groups that ended without being trained, for the trainer's checkpoint.
-- KEYS     the run
-- ARGV     none
-- Returns  msgpack: failed, filtered (how many groups), retries (order -> how often its group was retried); then the bitmaps of the orders
--          of both and of those that failed (the most significant bit of the first byte is order 0)
-- Errors   HR_UNAVAILABLE: no such run
-- uses: _args, _register
register_reader('ended', nil, function(run)
  local failed, filtered = unpack(redis.call('HMGET', run.base .. 'counts', 'train:failed', 'train:filtered'))
  local counts = {
    failed = tonumber(failed or 0), filtered = tonumber(filtered or 0),
    retries = unless_empty(numbers(redis.call('HGETALL', run.base .. 'retries'))),
  }
  return {cmsgpack.pack(counts), redis.call('GET', run.base .. 'ended') or '', redis.call('GET', run.base .. 'failures') or ''}
end)
