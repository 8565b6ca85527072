-- masked: how many tokens of a step's policy loss were over age, as the trainer has counted them. The same step again changes nothing.
-- KEYS     the run
-- ARGV     step, timeline, tokens
-- Returns  1
-- Errors   HR_TIMELINE, HR_INVALID
register('hr_masked', 3, function(run, args)
  local step, tokens = natural(args[1], 'step'), positive(args[3], 'tokens')
  require_timeline(run, args[2])
  local told = args[2] .. ' ' .. step
  if redis.call('HGET', run.key, 'masked') == told then return 1 end
  redis.call('HSET', run.key, 'masked', told)
  add(sums_of(run, 'masked'), 'tokens', tokens)
  return 1
end)
