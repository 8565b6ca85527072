-- masked: how many tokens of a step's policy loss were over age, as the trainer has counted them. The same step again changes nothing.
-- KEYS     the run
-- ARGV     step, timeline, tokens
-- Returns  1
-- Errors   HR_TIMELINE, HR_INVALID
-- uses: _args, _meter, _register, _run
register('hr_masked', {step = natural, timeline = text, tokens = positive}, function(run, call)
  require_timeline(run, call.timeline)
  local told = call.timeline .. ' ' .. call.step
  if redis.call('HGET', run.key, 'masked') == told then return 1 end
  redis.call('HSET', run.key, 'masked', told)
  add(sums_of(run, 'masked'), 'tokens', call.tokens)
  return 1
end)
