-- drop_validation: forget every group of the validation lane, leased or not, with its payloads.
-- KEYS     the run
-- ARGV     timeline
-- Returns  groups still to be dropped: call again until 0
-- Errors   HR_TIMELINE
register('hr_drop_validation', 1, function(run, args)
  require_timeline(run, args[1])
  wake(run, 'work')
  return drop_validation(run, BATCH)
end)
