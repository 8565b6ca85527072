-- take_scoring: trajectories that wait for a score, oldest first, go to a scorer until its deadline.
-- KEYS     the run
-- ARGV     scorer, most trajectories, nonce (tokens are made of it)
-- Returns  for each trajectory: group id, index, payload key, record key, token, scoring attempt
-- Errors   HR_INVALID
register('hr_take_scoring', 3, function(run, args)
  local scorer, nonce = name(args[1], 'scorer'), name(args[3], 'nonce')
  local most = math.min(positive(args[2], 'most trajectories'), BATCH)
  local members = redis.call('ZRANGE', run.base .. 'unscored', 0, most - 1)
  if #members == 0 then return {} end
  local reply, taken = {}, {}
  local deadline = run.now + run.scoring_deadline_ms
  for i, member in ipairs(members) do
    local index, id = string.match(member, '^(%d+):(.+)$')
    local key = group_key(run, id)
    local pushed, work, record = unpack(redis.call('HMGET', key, 'p' .. index, 'w' .. index, 'record'))
    local attempts = tonumber(string.match(work or '0', '^%d+')) + 1
    local token = nonce .. '-' .. i .. '/' .. scorer
    redis.call('HSET', key, 'w' .. index, attempts .. ' ' .. token)
    taken[2 * i - 1], taken[2 * i] = deadline, member
    for _, value in ipairs({id, index, run.base .. 'p:' .. string.match(pushed, '^%S+'), run.base .. 'd:' .. record, token,
      attempts}) do reply[#reply + 1] = value end
  end
  redis.call('ZREM', run.base .. 'unscored', unpack(members))
  redis.call('ZADD', run.base .. 'taken', unpack(taken))
  due_at(run, deadline)
  return reply
end)
