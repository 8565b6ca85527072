-- Trajectories as replicas hand them in, finished (push) or to be gone on from (save): `<group id> <index> <token> <nonce> <bytes> <length>
-- <oldest> <newest>`, length in tokens, weight versions; then the payload of so many bytes, or '' where it is staged at p:<nonce> with a time to live.

local PAYLOAD_LINE = '^(' .. NAME .. ') (%d+) (' .. NAME .. ') (' .. NAME .. ') (%d+) ((%d+) (%d+) (%d+))$'

-- Lua takes its time to write a number out: `at` is the index as text, as it becomes part of many names, and `extent` is length, oldest and
-- newest version as they are kept.
local function parse_payload(place, prefix, line, payload)
  local id, at, token, nonce, bytes, extent, length, oldest, newest = string.match(line, PAYLOAD_LINE)
  if not id or #line > 1000 then
    refuse('HR_INVALID', 'trajectory ' .. show(line) .. ' is not an id, an index, a token, a nonce and four numbers')
  end
  bytes = natural(bytes, 'bytes')
  if payload ~= '' and #payload ~= bytes then
    refuse('HR_INVALID', 'the payload of trajectory ' .. id .. ':' .. at .. ' has ' .. #payload .. ' bytes, not ' .. bytes)
  end
  return {
    id = id, index = natural(at, 'index'), at = at, token = token, nonce = nonce, bytes = bytes, extent = extent,
    length = positive(length, 'length'), oldest = natural(oldest, 'oldest version'), newest = natural(newest, 'newest version'),
    payload = payload, key = prefix .. nonce, place = place,
  }
end

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

-- The entries of a call, from the arguments after timeline and incarnation.
local function parse_payloads(run, args)
  local all, count = {}, entries(args, 2, 2, BATCH)
  local prefix = run.key .. ':' .. name(args[2], 'incarnation') .. ':p:'
  for i = 1, count do
    all[i] = parse_payload(i, prefix, args[2 * i + 1], args[2 * i + 2])
  end
  return all
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
