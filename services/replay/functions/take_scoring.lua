-- take_scoring: trajectories that wait for a score, oldest first, go to a scorer until its deadline.
-- KEYS     the run
-- ARGV     scorer, most (trajectories), nonce (the token is made of it)
-- Returns  msgpack: token (of all that are taken), payload_prefix (of keys), groups. Each has group (id), record (key), and of its
--          trajectories indices, nonces (the payloads' keys end with them) and scoring_attempts
-- Errors   HR_INVALID
-- uses: _args, _group, _register, _run

-- Neighbours in line are mostly of one group: {id, indices} for each run of them.
local function by_group(members)
  local groups = {}
  for _, member in ipairs(members) do
    local id, index = split_member(member)
    local last = groups[#groups]
    if not last or last.id ~= id then
      last = {id = id, indices = {}}
      groups[#groups + 1] = last
    end
    last.indices[#last.indices + 1] = index
  end
  return groups
end

local function take(run, id, indices, token)
  local key = group_key(run, id)
  local fields = {'record'}
  for _, index in ipairs(indices) do
    fields[#fields + 1] = 'p' .. index
    fields[#fields + 1] = 'w' .. index
  end
  local values = redis.call('HMGET', key, unpack(fields))
  local written, taken, nonces, attempts = {}, {}, {}, {}
  for i, index in ipairs(indices) do
    local attempt = tonumber(string.match(values[2 * i + 1] or '0', '^%d+')) + 1
    written[2 * i - 1], written[2 * i] = 'w' .. index, attempt .. ' ' .. token
    taken[i], nonces[i], attempts[i] = tonumber(index), string.match(values[2 * i], '^%S+'), attempt
  end
  redis.call('HSET', key, unpack(written))
  return {
    group = id, record = run.base .. 'd:' .. values[1], indices = taken, nonces = nonces, scoring_attempts = attempts,
  }
end

register('hr_take_scoring', {scorer = name, most = positive, nonce = name}, function(run, call)
  local most = math.min(call.most, BATCH)
  local members = redis.call('ZRANGE', run.base .. 'unscored', 0, most - 1)
  if #members == 0 then return cmsgpack.pack({token = '', payload_prefix = '', groups = {}}) end
  local groups, taken, token = {}, {}, call.nonce .. '-' .. take_ticket(run) .. '/' .. call.scorer
  for i, group in ipairs(by_group(members)) do groups[i] = take(run, group.id, group.indices, token) end
  local deadline = run.now + run.scoring_deadline_ms
  local score = string.format('%d', deadline)
  for i, member in ipairs(members) do taken[2 * i - 1], taken[2 * i] = score, member end
  redis.call('ZREMRANGEBYRANK', run.base .. 'unscored', 0, #members - 1)
  redis.call('ZADD', run.base .. 'taken', unpack(taken))
  due_at(run, deadline)
  return cmsgpack.pack({token = token, payload_prefix = run.base .. 'p:', groups = groups})
end)
