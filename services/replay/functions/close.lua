-- close: no more training prompts will come, until a rewind opens the queue again. Idempotent.
-- KEYS     the run
-- ARGV     timeline
-- Returns  1
-- Errors   HR_TIMELINE
-- uses: _args, _register, _run
register('close', {timeline = text}, function(run, call)
  require_timeline(run, call.timeline)
  if run.closed == 0 then
    set(run, 'closed', 1)
    event(run, 'closed')
    wake(run, 'ready')
  end
  return 1
end)
