-- stats: read the statistics of the run, for people.
-- KEYS     the run
-- ARGV     none
-- Returns  msgpack: the run's state, opened (the start of the replay service that set its limits), refusals by code, requeues by cause,
--          bytes, full (see _memory.lua), ages of the last batch, the scoring line, leases, suspects (groups that wait to be leased apart
--          because their replica died), the newest dead letters, and how many of the next P groups in line are ready
-- uses: _args, _group, _register, _scoring
local function scoring_line(run)
  local line, oldest = {waiting = 0, taken = 0}, run.now
  for _, env in ipairs(environments_of(run)) do
    for _, place in ipairs({'unscored', 'alone'}) do
      local first = redis.call('ZRANGE', place_of(run, place, env), 0, 0, 'WITHSCORES')
      oldest = math.min(oldest, tonumber(first[2] or run.now))
      line.waiting = line.waiting + redis.call('ZCARD', place_of(run, place, env))
    end
    line.taken = line.taken + redis.call('ZCARD', place_of(run, 'taken', env))
  end
  line.oldest_s = (run.now - oldest) / 1000
  return line
end

local function newest_failed(run)
  local letters = {}
  for i, id in ipairs(redis.call('ZREVRANGE', run.base .. 'failed', 0, 19)) do
    local reason, lane = unpack(redis.call('HMGET', group_key(run, id), 'reason', 'lane'))
    letters[i] = {group = id, reason = reason, lane = lane}
  end
  return letters
end

register_reader('stats', nil, function(run)
  local age_mean, age_max = unpack(redis.call('HMGET', run.key, 'age_mean', 'age_max'))
  local stats = run_state(run)
  stats.opened = redis.call('HGET', run.key, 'opened') or ''
  stats.counts = unless_empty(counts_of(run))
  stats.refusals = unless_empty(numbers(redis.call('HGETALL', run.base .. 'refusals')))
  stats.requeues = unless_empty(numbers(redis.call('HGETALL', run.base .. 'requeues')))
  stats.bytes, stats.max_bytes, stats.full = run.bytes, run.max_bytes, run.full
  stats.age_mean, stats.age_max = tonumber(age_mean or nil) or 0, tonumber(age_max or nil) or 0
  stats.scoring = scoring_line(run)
  stats.leases = redis.call('ZCARD', run.base .. 'leases')
  stats.suspects = redis.call('ZCARD', of_kind(run, 'suspects'))
  for _, kind in ipairs({'episodes', 'validators'}) do
    stats.suspects = stats.suspects + redis.call('ZCARD', of_kind(run, 'suspects', kind))
  end
  stats.line = redis.call('ZCARD', run.base .. 'line')
  stats.prompts_per_step, stats.max_age = run.prompts_per_step, run.max_age
  stats.failed = newest_failed(run)
  return cmsgpack.pack(stats)
end)
