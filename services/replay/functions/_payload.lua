-- Trajectories as replicas hand them in, finished (push) or to be gone on from (save).
--
-- Entry    a map of group (its id), index, token (of the lease), nonce, bytes (of the payload), length (in tokens), oldest, newest (weight
--          versions). Its bytes are the payload, or '' where that is staged at p:<nonce> with a time to live.
-- uses: _args, _group

-- Lua takes its time to write a number out: `at` is the index as text, as it becomes part of many names, and `extent` is length, oldest and
-- newest version as they are kept.
local function parse_payload(place, prefix, given, payload)
  local index, length, bytes = natural(given.index, 'index'), positive(given.length, 'length'), natural(given.bytes, 'bytes')
  local oldest, newest = natural(given.oldest, 'oldest'), natural(given.newest, 'newest')
  local entry = {
    id = name(given.group, 'group'), index = index, at = tostring(index), token = name(given.token, 'token'),
    nonce = name(given.nonce, 'nonce'), bytes = bytes, extent = length .. ' ' .. oldest .. ' ' .. newest, length = length, oldest = oldest,
    newest = newest, payload = payload, place = place,
  }
  entry.key = prefix .. entry.nonce
  if payload ~= '' and #payload ~= bytes then
    refuse('HR_INVALID', 'the payload of trajectory ' .. entry.id .. ':' .. index .. ' has ' .. #payload .. ' bytes, not ' .. bytes)
  end
  return entry
end

local PAYLOADS = {timeline = text, incarnation = name, trajectories = list_of(map, BATCH)}

-- Why the trajectory is refused whatever its index: code and message, or nil.
local function lease_refusal(run, entry, group)
  if group and group.token == entry.token and group.state ~= 'open' then
    return 'HR_SURPLUS', 'group ' .. entry.id .. ' has its ' .. group.n .. ' trajectories without this one'
  end
  if not group or group.token ~= entry.token then
    return 'HR_LEASE_LOST', 'the lease of group ' .. entry.id .. ' is over'
  end
  if lease_over(run, entry.id) then
    return 'HR_LEASE_LOST', 'the lease of group ' .. entry.id .. ' has expired'
  end
end

local function record_refusal(run, entry, group)
  if entry.index >= group.count then
    return 'HR_INVALID', 'index ' .. entry.index .. ' of group ' .. entry.id .. ', which has ' .. group.count .. ' trajectories'
  end
  if entry.oldest > entry.newest or entry.newest > run.next_step then
    return 'HR_INVALID', 'versions ' .. entry.oldest .. ' to ' .. entry.newest .. ' of group ' .. entry.id .. '; the newest weights are ' .. run.next_step
  end
end

local function parse_payloads(run, call, args)
  require_bytes(#call.trajectories, args)
  local all, prefix = {}, run.key .. ':' .. call.incarnation .. ':p:'
  for i, given in ipairs(call.trajectories) do all[i] = parse_payload(i, prefix, given, args[i + 1]) end
  return all
end

-- A rewind or restore has ended what the call names.
local function is_foreign(run, call)
  return run.timeline ~= call.timeline or run.incarnation ~= call.incarnation
end

-- The payload is there to stay; or code and message.
local function keep_payload(entry)
  if entry.payload ~= '' then
    redis.call('SET', entry.key, entry.payload)
  elseif redis.call('PERSIST', entry.key) == 0 then
    return 'HR_INVALID', 'the payload of group ' .. entry.id .. ' was not staged, or its time ran out'
  end
end

-- What was staged goes, unless it is what an earlier delivery of the same call made permanent.
local function unstage(entry, mine)
  if entry.payload == '' and (not mine or string.match(mine, '^%S+') ~= entry.nonce) then redis.call('UNLINK', entry.key) end
end
