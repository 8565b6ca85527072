-- masked: record how many tokens of a step's policy loss were over age, by the trainer's count. Repeating the step, or an older one,
-- changes nothing.
-- KEYS     the run
-- ARGV     step, timeline, tokens
-- Returns  1
-- Errors   HR_TIMELINE, HR_INVALID
-- uses: _args, _meter, _register, _run
register('masked', {step = natural, timeline = text, tokens = positive}, function(run, call)
  require_timeline(run, call.timeline)
  if not told_before(run, 'masked', call.step) then meter_count(run, 'masked', call.tokens, 'tokens') end
  return 1
end)
