-- score: what the environment said comes back. The last score makes the group ready (validation: evaluated).
-- KEYS     the run
-- ARGV     for each trajectory: group id, index, token, status, reward ('' unless SCORED), score record (msgpack), message
-- Returns  for each trajectory '' or `<code> <message>`
-- Errors   HR_INVALID (malformed). Of entries: HR_LEASE_LOST
--
-- Law 7: only SCORED carries a reward. FAILED and TIMED_OUT are tried again up to max_scoring_attempts and then fail the group
-- with the message; INVALID fails it at once.

local STATUSES = {SCORED = true, FAILED = true, TIMED_OUT = true, INVALID = true}

local function parse(args, i)
  local entry = {
    id = name(args[i], 'group id'), index = natural(args[i + 1], 'index'), token = name(args[i + 2], 'token'),
    status = choice(args[i + 3], STATUSES, 'status'), reward = args[i + 4], record = args[i + 5], message = args[i + 6],
  }
  if entry.status == 'SCORED' then
    finite(entry.reward, 'reward')
  elseif entry.reward ~= '' then
    refuse('HR_INVALID', 'status ' .. entry.status .. ' with reward ' .. show(entry.reward) .. '; only SCORED has one')
  end
  return entry
end

local function all_scored(run, entry, key, lane, ticket)
  if lane == 'train' then
    redis.call('HSET', key, 'state', 'ready')
    redis.call('ZADD', run.base .. 'ready', ticket, entry.id)
    move(run, lane, 'scoring', 'ready')
  else
    redis.call('HSET', key, 'state', 'evaluated')
    move(run, lane, 'scoring', 'evaluated')
  end
  wake(run, 'ready')
end

local function score(run, entry, done)
  local key = group_key(run, entry.id)
  local work, reward, pushed, n, scored, lane, ticket = unpack(redis.call('HMGET', key, 'w' .. entry.index,
    'r' .. entry.index, 'p' .. entry.index, 'n', 'scored', 'lane', 'ticket'))
  local attempts, token = string.match(work or '', '^(%d+) (.+)$')
  if token ~= entry.token then
    return refuse_entry(run, 'HR_LEASE_LOST', 'trajectory ' .. entry.index .. ' of group ' .. entry.id ..
      ' is no longer with this scorer')
  end
  if reward then return '' end  -- the same call again
  if run.backlog and tonumber(redis.call('ZSCORE', run.base .. 'taken', entry.index .. ':' .. entry.id)) <= run.now then
    return refuse_entry(run, 'HR_LEASE_LOST', 'the time to score group ' .. entry.id .. ' is over')
  end
  if entry.status ~= 'SCORED' then
    local group = load_group(run, entry.id)
    local message = entry.status .. ': ' .. words(entry.message)
    if entry.status == 'INVALID' then
      fail(run, group, 'scoring refused: ' .. message)
    else
      retry_scoring(run, group, entry.index, tonumber(attempts), message)
    end
    return ''
  end
  redis.call('SET', run.base .. 's:' .. string.match(pushed, '^%S+'), entry.record)
  redis.call('HSET', key, 'scored', scored + 1, 'r' .. entry.index, entry.reward)
  done[#done + 1] = entry.index .. ':' .. entry.id
  if scored + 1 == tonumber(n) then all_scored(run, entry, key, lane, ticket) end
  return ''
end

register('hr_score', nil, function(run, args)
  local parsed, reply, done = {}, {}, {}
  for i = 1, entries(args, 0, 7, BATCH) do parsed[i] = parse(args, 1 + (i - 1) * 7) end
  for i, entry in ipairs(parsed) do reply[i] = score(run, entry, done) end
  if #done > 0 then redis.call('ZREM', run.base .. 'taken', unpack(done)) end
  return reply
end)
