-- append: store a call of an episode, before the program gets its answer.
-- KEYS     the run
-- ARGV     timeline (of the weights that wrote it), incarnation, group (its id), token, index, tries (how often the episode was begun
--          before), number (of the call, from 0 in order), parent (number of the call that it continues; -1: a root), nonce, oldest and
--          newest (weight versions); then its bytes
-- Returns  1; the same call again changes nothing
-- Errors   HR_TIMELINE, HR_LEASE_LOST (the episode has started over, or the server lost that write), HR_SURPLUS (the episode has ended, or
--          the group has its n without it), HR_INVALID (also: out of order, its parent is absent, or a rewind undid these weights),
--          HR_EPISODE_BYTES (more than max_episode_bytes)
--
-- The calls of an episode are one list, each preceded by its nonce. The lease already counts their bytes.
-- uses: _args, _episode, _group, _register, _trajectory

-- The calls so far (key and number), their bytes, and their oldest and newest version.
local function appended(run, group, entry)
  local nonce, bytes, oldest, newest = extent_of(redis.call('HGET', group.key, 'q' .. entry.at))
  local key = payload_key(run, nonce or entry.nonce)
  local calls = {key = key, nonce = nonce or entry.nonce, count = 0, bytes = 0, oldest = entry.oldest, newest = entry.newest}
  if nonce then
    calls.count, calls.bytes = redis.call('LLEN', key), bytes
    calls.oldest, calls.newest = math.min(oldest, entry.oldest), math.max(newest, entry.newest)
  end
  return calls
end

local function refuse_call(call, why)
  refuse('HR_INVALID', 'call ' .. call.number .. ' of episode ' .. call.index .. ' of group ' .. call.group .. ' ' .. why)
end

register('append', {
  timeline = text, incarnation = name, group = name, token = text, index = natural, tries = natural, number = natural,
  parent = natural_or_none, nonce = name, oldest = natural, newest = natural,
}, function(run, call, args)
  require_bytes(1, args)
  local entry = {
    id = call.group, index = call.index, at = string.format('%d', call.index), token = call.token, nonce = call.nonce, oldest = call.oldest,
    newest = call.newest,
  }
  local group, code, message = episode_of(run, call, entry)
  if group then code, message = episode_refusal(run, call, entry, group) end
  if code then refuse(code, message) end
  if group.has_ended then refuse('HR_SURPLUS', 'episode ' .. entry.at .. ' of group ' .. entry.id .. ' has ended') end
  local calls, kept = appended(run, group, entry), call.nonce .. ' ' .. args[2]
  if call.number < calls.count then
    if redis.call('LINDEX', calls.key, call.number) ~= kept then refuse_call(call, 'is another one') end
    return 1
  end
  code, message = weights_refusal(run, call, entry)
  if code then refuse(code, message) end
  if call.number > calls.count then refuse_call(call, 'comes after only ' .. calls.count .. ' calls') end
  if call.parent >= call.number then refuse_call(call, 'continues call ' .. call.parent .. ', which is not before it') end
  if calls.count == 0 and redis.call('EXISTS', calls.key) == 1 then refuse_call(call, 'has the nonce of another payload') end
  code, message = bytes_refusal(run, entry, calls.bytes + #args[2])
  if code then refuse(code, message) end
  redis.call('RPUSH', calls.key, kept)
  redis.call('HSET', group.key, 'q' .. entry.at,
    saved_value(calls.nonce, string.format('%d %d %d', calls.bytes + #args[2], calls.oldest, calls.newest)))
  if calls.count == 0 then redis.call('HSET', group.key, 'saves', (group.saves or 0) + 1) end
  note_progress(run, group)
  return 1
end, true, true)
