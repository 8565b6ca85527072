-- push: finished trajectories come in, each under its group's lease (law 3). The last one sends the group to scoring.
-- KEYS     the run
-- ARGV     timeline, incarnation, then for each trajectory: group id, index, token, nonce of the payload staged at p:<nonce> with
--          a time to live, length in tokens, oldest and newest weight version
-- Returns  for each trajectory '' or `<code> <message>`; a refused one leaves nothing behind. The same index again under the same
--          token is accepted and changes nothing.
-- Errors   HR_INVALID (malformed). Of entries: HR_TIMELINE, HR_LEASE_LOST, HR_INVALID

local function parse(args, i)
  return {
    id = name(args[i], 'group id'), index = natural(args[i + 1], 'index'), token = name(args[i + 2], 'token'),
    nonce = name(args[i + 3], 'nonce'), length = positive(args[i + 4], 'length'),
    oldest = natural(args[i + 5], 'oldest version'), newest = natural(args[i + 6], 'newest version'),
  }
end

-- Why the trajectory is refused: code and message, or nil.
local function refusal(run, entry, state, token, n)
  if not state or token ~= entry.token or state ~= 'open' then
    return 'HR_LEASE_LOST', 'the lease of group ' .. entry.id .. ' is over'
  end
  if run.backlog and tonumber(redis.call('ZSCORE', run.base .. 'leases', entry.id)) <= run.now then
    return 'HR_LEASE_LOST', 'the lease of group ' .. entry.id .. ' has expired'
  end
  if entry.index >= n then
    return 'HR_INVALID', 'index ' .. entry.index .. ' of group ' .. entry.id .. ', which has ' .. n .. ' trajectories'
  end
  if entry.oldest > entry.newest or entry.newest > run.next_step then
    return 'HR_INVALID', 'versions ' .. entry.oldest .. ' to ' .. entry.newest .. ' of group ' .. entry.id ..
      '; the newest weights are ' .. run.next_step
  end
end

-- All n are in: the lease is done and its unused bytes are free; the token stays, so that a repeated push is known.
local function complete(run, entry, lane, replica, held, actual, key)
  end_lease(run, {id = entry.id, replica = replica})
  hold(run, {held = held}, actual)
  redis.call('HSET', key, 'state', 'scoring', 'held', actual)
  move(run, lane, 'open', 'scoring')
end

local function accept(run, entry, key, values, size)
  local _, _, n, pushed, oldest, newest, actual, lane, replica, held = unpack(values)
  pushed, actual = pushed + 1, actual + size
  redis.call('PERSIST', entry.payload)
  redis.call('HSET', key, 'pushed', pushed, 'actual', actual,
    'oldest', math.min(tonumber(oldest or entry.oldest), entry.oldest),
    'newest', math.max(tonumber(newest or entry.newest), entry.newest),
    'p' .. entry.index, entry.nonce .. ' ' .. entry.length .. ' ' .. entry.oldest .. ' ' .. entry.newest)
  redis.call('ZADD', run.base .. 'unscored', run.now, entry.index .. ':' .. entry.id)
  wake(run, 'scoring')
  if pushed == tonumber(n) then complete(run, entry, lane, replica, tonumber(held), actual, key) end
end

-- The staged payload goes, unless it is the one an earlier delivery of the same call made permanent.
local function unstage(entry, mine)
  if not mine or string.match(mine, '^%S+') ~= entry.nonce then redis.call('UNLINK', entry.payload) end
end

local function push(run, entry, foreign)
  local key = group_key(run, entry.id)
  local values = redis.call('HMGET', key, 'state', 'token', 'n', 'pushed', 'oldest', 'newest', 'actual', 'lane', 'replica',
    'held', 'p' .. entry.index)
  local state, token, n, mine = values[1], values[2], tonumber(values[3] or nil), values[11]
  local code, message
  if foreign then
    code, message = 'HR_TIMELINE', 'a rewind or restore has ended the timeline of group ' .. entry.id
  elseif mine and token == entry.token then
    unstage(entry, mine)
    return ''
  else
    code, message = refusal(run, entry, state, token, n)
  end
  local size = code and 0 or redis.call('STRLEN', entry.payload)
  if not code and size == 0 then
    code, message = 'HR_INVALID', 'the payload of group ' .. entry.id .. ' was not staged, or its time ran out'
  end
  if code then
    unstage(entry, mine)
    return refuse_entry(run, code, message)
  end
  accept(run, entry, key, values, size)
  return ''
end

register('hr_push', nil, function(run, args)
  local parsed = {}
  local count = entries(args, 2, 7, BATCH)
  local staged = run.key .. ':' .. name(args[2], 'incarnation') .. ':p:'
  for i = 1, count do
    parsed[i] = parse(args, 3 + (i - 1) * 7)
    parsed[i].payload = staged .. parsed[i].nonce
  end
  local foreign = run.timeline ~= args[1] or run.incarnation ~= args[2]
  local reply = {}
  for i, entry in ipairs(parsed) do reply[i] = push(run, entry, foreign) end
  return reply
end)
