-- take_scoring: give waiting trajectories to a scorer until its deadline, which it renews (renew_scoring). A repeat of the newest call gets
-- the same answer; an earlier call takes nothing.
-- KEYS     the run
-- ARGV     client (the scorer), number (of this client's call, higher than any before), environments (names), most (for each, how many
--          trajectories may be sent now), nonce (from which the token is made)
-- Returns  msgpack: token (of all that are taken), payload_prefix (of keys), groups. Each has group (id), record (key), and for its
--          trajectories indices, nonces (the payloads' keys end with them), scoring_attempts, and waited_ms: for how long they could have
--          been taken
-- Errors   HR_FENCED (the call arrives late: the scorer has called again since), HR_INVALID
--
-- For each environment, the trajectories that could be taken for the longest come first, up to BATCH in all. A suspect and the probe of a
-- broken environment go alone (_scoring.lua).
-- uses: _args, _group, _register, _run, _scoring, _trajectory

-- Neighbours in line mostly belong to one group: {id, indices, waited_ms} for each run of them. Each of `members` is followed by the time
-- since which it waits.
local function by_group(run, members)
  local groups = {}
  for i = 1, #members, 2 do
    local id, index = split_member(members[i])
    local last = groups[#groups]
    if not last or last.id ~= id then
      last = {id = id, indices = {}, waited_ms = {}}
      groups[#groups + 1] = last
    end
    last.indices[#last.indices + 1] = index
    last.waited_ms[#last.waited_ms + 1] = run.now - members[i + 1]
  end
  return groups
end

local function take(run, group, token)
  local key, indices = group_key(run, group.id), group.indices
  local fields = {'record'}
  for _, index in ipairs(indices) do
    fields[#fields + 1] = 'p' .. index
    fields[#fields + 1] = 'w' .. index
  end
  local values = redis.call('HMGET', key, unpack(fields))
  local written, taken, nonces, attempts = {}, {}, {}, {}
  for i, index in ipairs(indices) do
    local attempt = scoring_of(values[2 * i + 1]) + 1
    written[2 * i - 1], written[2 * i] = 'w' .. index, scoring_value(attempt, token)
    taken[i], nonces[i], attempts[i] = tonumber(index), nonce_of(values[2 * i]), attempt
  end
  redis.call('HSET', key, unpack(written))
  return {
    group = group.id, record = run.base .. 'd:' .. values[1], indices = taken, nonces = nonces, scoring_attempts = attempts,
    waited_ms = group.waited_ms,
  }
end

-- Give members of one environment, each with the time since which it waited, to the scorer until `deadline`.
local function take_members(run, env, most, deadline)
  local place, count, alone, chosen = allowance(run, env, most)
  local members = count == 0 and {} or chosen or
    redis.call('ZRANGEBYSCORE', place_of(run, place, env), '-inf', run.now, 'WITHSCORES', 'LIMIT', 0, count)
  if #members == 0 then return members end
  local score, taken = string.format('%d', deadline), {}
  for i = 1, #members, 2 do taken[i], taken[i + 1] = score, members[i] end
  if chosen then
    redis.call('ZREM', place_of(run, place, env), chosen[1])
  else
    redis.call('ZREMRANGEBYRANK', place_of(run, place, env), 0, #members / 2 - 1)
  end
  redis.call('ZADD', place_of(run, 'taken', env), unpack(taken))
  if alone then redis.call('HSET', environment_key(run, env), 'alone', place .. ' ' .. members[1]) end
  return members
end

register('take_scoring', {
  client = name, number = positive, environments = list_of(name, BATCH), most = list_of(positive, BATCH), nonce = name,
}, function(run, call)
  if #call.environments ~= #call.most then refuse('HR_INVALID', #call.environments .. ' environments, and ' .. #call.most .. ' of most') end
  local clients, field = run.key .. ':clients', 'taken ' .. call.client
  local newest, before = unpack(redis.call('HMGET', clients, 'take ' .. call.client, field))
  if before and call.number == tonumber(newest) then return before end
  if made_before(run, 'take', call) then
    refuse('HR_FENCED', 'take_scoring ' .. call.number .. ' of ' .. call.client .. ' was answered before')
  end
  local deadline, room, groups, token = run.now + run.scoring_deadline_ms, BATCH, {}, ''
  for i, env in ipairs(call.environments) do
    local members = room > 0 and take_members(run, env, math.min(call.most[i], room), deadline) or {}
    if #members > 0 and token == '' then token = call.nonce .. '-' .. take_ticket(run) .. '/' .. call.client end
    for _, group in ipairs(by_group(run, members)) do groups[#groups + 1] = take(run, group, token) end
    room = room - #members / 2
  end
  if token ~= '' then due_at(run, deadline) end
  local reply = cmsgpack.pack({token = token, payload_prefix = payload_key(run, ''), groups = groups})
  redis.call('HSET', clients, field, reply)
  return reply
end)
