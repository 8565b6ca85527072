-- Drop up to `most` groups of the validation lane, leased or not; returns how many are left.
-- uses: _args, _group, _run
local function drop_validation(run, most)
  local lane = run.base .. 'lane'
  local ids = redis.call('SRANDMEMBER', lane, most)
  for _, id in ipairs(ids) do
    local group = load_group(run, id)
    leave(run, group)
    discard(run, group)
    erase(run, group)
    redis.call('ZREM', run.base .. 'failed', id)
    -- a group that had not ended is left over
    if group.state ~= 'evaluated' and group.state ~= 'failed' then move(run, 'validation', group.state, 'unused') end
  end
  for first = 1, #ids, BATCH do
    redis.call('SREM', lane, unpack(ids, first, math.min(first + BATCH - 1, #ids)))
  end
  return redis.call('SCARD', lane)
end
