-- take_scoring: trajectories that wait for a score, oldest first, go to a scorer until its deadline.
-- KEYS     the run
-- ARGV     scorer, most (trajectories), nonce (the token is made of it)
-- Returns  msgpack: token (of all that are taken), jobs. Each has group (id), index, payload (key), record (key), scoring_attempt
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

local function take(run, id, indices, token, jobs)
  local key = group_key(run, id)
  local fields = {'record'}
  for _, index in ipairs(indices) do
    fields[#fields + 1] = 'p' .. index
    fields[#fields + 1] = 'w' .. index
  end
  local values = redis.call('HMGET', key, unpack(fields))
  local record, written = run.base .. 'd:' .. values[1], {}
  for i, index in ipairs(indices) do
    local attempts = tonumber(string.match(values[2 * i + 1] or '0', '^%d+')) + 1
    written[2 * i - 1], written[2 * i] = 'w' .. index, attempts .. ' ' .. token
    jobs[#jobs + 1] = {
      group = id, index = tonumber(index), payload = run.base .. 'p:' .. string.match(values[2 * i], '^%S+'), record = record,
      scoring_attempt = attempts,
    }
  end
  redis.call('HSET', key, unpack(written))
end

register('hr_take_scoring', {scorer = name, most = positive, nonce = name}, function(run, call)
  local most = math.min(call.most, BATCH)
  local members = redis.call('ZRANGE', run.base .. 'unscored', 0, most - 1)
  if #members == 0 then return cmsgpack.pack({jobs = {}}) end
  local jobs, taken, token = {}, {}, call.nonce .. '-' .. take_ticket(run) .. '/' .. call.scorer
  for _, group in ipairs(by_group(members)) do take(run, group.id, group.indices, token, jobs) end
  local deadline = run.now + run.scoring_deadline_ms
  local score = string.format('%d', deadline)
  for i, member in ipairs(members) do taken[2 * i - 1], taken[2 * i] = score, member end
  redis.call('ZREMRANGEBYRANK', run.base .. 'unscored', 0, #members - 1)
  redis.call('ZADD', run.base .. 'taken', unpack(taken))
  due_at(run, deadline)
  return cmsgpack.pack({token = token, jobs = jobs})
end)
