-- drop_validation: forget every group of the validation lane, leased or not, with its payloads.
-- KEYS     the run
-- ARGV     timeline
-- Returns  groups still to be dropped: call again until 0
-- Errors   HR_TIMELINE
-- uses: _args, _register, _run, _validation
register('hr_drop_validation', {timeline = text}, function(run, call)
  require_timeline(run, call.timeline)
  wake(run, 'work')
  return drop_validation(run, BATCH)
end)
