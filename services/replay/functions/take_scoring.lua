-- take_scoring: trajectories that wait for a score go to a scorer until its deadline, which it renews (renew_scoring).
-- KEYS     the run
-- ARGV     scorer, environments (names), most (trajectories of each of these that may be sent now), nonce (the token is made of it)
-- Returns  msgpack: token (of all that are taken), payload_prefix (of keys), groups. Each has group (id), record (key), and of its
--          trajectories indices, nonces (the payloads' keys end with them) and scoring_attempts
-- Errors   HR_INVALID
--
-- Of each environment those first that may be taken the longest, up to BATCH in all. A suspect, and the probe of a broken environment, go
-- alone (_scoring.lua).
-- uses: _args, _group, _register, _run, _scoring

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

-- Members of one environment are the scorer's until `deadline`.
local function take_members(run, env, most, deadline)
  local place, count, alone = allowance(run, env, most)
  local members = count == 0 and {} or redis.call('ZRANGEBYSCORE', place_of(run, place, env), '-inf', run.now, 'LIMIT', 0, count)
  if #members == 0 then return members end
  local score, taken = string.format('%d', deadline), {}
  for i, member in ipairs(members) do taken[2 * i - 1], taken[2 * i] = score, member end
  redis.call('ZREMRANGEBYRANK', place_of(run, place, env), 0, #members - 1)
  redis.call('ZADD', place_of(run, 'taken', env), unpack(taken))
  if alone then redis.call('HSET', environment_key(run, env), 'alone', place .. ' ' .. members[1]) end
  return members
end

register('hr_take_scoring', {
  scorer = name, environments = list_of(name, BATCH), most = list_of(positive, BATCH), nonce = name,
}, function(run, call)
  if #call.environments ~= #call.most then refuse('HR_INVALID', #call.environments .. ' environments, and ' .. #call.most .. ' of most') end
  local deadline, room, groups, token = run.now + run.scoring_deadline_ms, BATCH, {}, ''
  for i, env in ipairs(call.environments) do
    local members = room > 0 and take_members(run, env, math.min(call.most[i], room), deadline) or {}
    if #members > 0 and token == '' then token = call.nonce .. '-' .. take_ticket(run) .. '/' .. call.scorer end
    for _, group in ipairs(by_group(members)) do groups[#groups + 1] = take(run, group.id, group.indices, token) end
    room = room - #members
  end
  if token ~= '' then due_at(run, deadline) end
  return cmsgpack.pack({token = token, payload_prefix = run.base .. 'p:', groups = groups})
end)
