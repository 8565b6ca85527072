-- close: no more training prompts will come, until a rewind opens the queue again. Idempotent.
-- KEYS     the run
-- ARGV     timeline
-- Returns  1
-- Errors   HR_TIMELINE
register('hr_close', 1, function(run, args)
  require_timeline(run, args[1])
  if run.closed == 0 then
    set(run, 'closed', 1)
    event(run, 'closed')
    wake(run, 'ready')
  end
  return 1
end)
