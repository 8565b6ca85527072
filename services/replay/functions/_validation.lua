-- Drop up to `most` groups of validations of versions < before, whether leased or not. Returns how many may be left.
-- uses: _args, _group, _run
local function drop_validation(run, most, before)
  local lane, ids, left = run.base .. 'lane', {}, {}
  for _, id in ipairs(redis.call('SRANDMEMBER', lane, most)) do
    local version = tonumber(redis.call('HGET', group_key(run, id), 'validation') or 0)
    if version < before then ids[#ids + 1] = id end
  end
  for _, id in ipairs(ids) do
    local group = load_group(run, id)
    leave(run, group)
    discard(run, group)
    erase(run, group)
    redis.call('ZREM', run.base .. 'failed', id)
    -- a group that has not ended is left over
    if group.state ~= 'evaluated' and group.state ~= 'failed' then
      move(run, 'validation', group.state, 'unused')
      left[#left + 1] = id
    end
  end
  if #left > 0 then tell(run, 'unused', table.concat(left, '\n')) end
  for first = 1, #ids, BATCH do
    redis.call('SREM', lane, unpack(ids, first, math.min(first + BATCH - 1, #ids)))
  end
  return #ids > 0 and redis.call('SCARD', lane) or 0
end
