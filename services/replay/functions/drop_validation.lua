-- drop_validation: delete every group of validations of versions < before, whether leased or not, with its payloads. None can be added
-- afterwards.
-- KEYS     the run
-- ARGV     timeline, before
-- Returns  the number of groups still to be dropped: repeat the call until 0
-- Errors   HR_TIMELINE
-- uses: _args, _register, _run, _validation
register('drop_validation', {timeline = text, before = natural}, function(run, call)
  require_timeline(run, call.timeline)
  if call.before > (run.validation or 0) then set(run, 'validation', call.before) end
  wake(run, 'work')
  return drop_validation(run, BATCH, call.before)
end)
