-- release_scoring: a scorer starts; what an earlier one had taken waits again at once, without costing an attempt.
-- KEYS     the run
-- ARGV     none
-- Returns  trajectories still to be released: call again until 0
-- uses: _args, _group, _register
register('hr_release_scoring', nil, function(run)
  local members = redis.call('ZRANGE', run.base .. 'taken', 0, BATCH - 1)
  for _, member in ipairs(members) do void_token(run, member) end
  return redis.call('ZCARD', run.base .. 'taken')
end)
