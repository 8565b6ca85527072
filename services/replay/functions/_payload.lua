-- Trajectories as replicas hand them in, finished (push) or to be gone on from (save): a line each, its payload staged at p:<nonce> with a
-- time to live.

local PAYLOAD_LINE = '^(' .. NAME .. ') (%d+) (' .. NAME .. ') (' .. NAME .. ') (%d+) (%d+) (%d+) (%d+)$'

-- `at` is the index as text: it becomes part of many names, and Lua would write the number out for each.
local function parse_payload(line)
  local id, index, token, nonce, bytes, length, oldest, newest = string.match(line, PAYLOAD_LINE)
  if not id or #line > 1000 then
    refuse('HR_INVALID', 'trajectory ' .. show(line) .. ' is not an id, an index, a token, a nonce and four numbers')
  end
  index = natural(index, 'index')
  return {
    id = id, index = index, at = tostring(index), token = token, nonce = nonce, bytes = natural(bytes, 'bytes'),
    length = positive(length, 'length'), oldest = natural(oldest, 'oldest version'), newest = natural(newest, 'newest version'),
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

-- The staged payload goes, unless it is the one an earlier delivery of the same call made permanent.
local function unstage(entry, mine)
  if not mine or string.match(mine, '^%S+') ~= entry.nonce then redis.call('UNLINK', entry.payload) end
end
