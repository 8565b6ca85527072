-- refilled: every prompt that a restore, or a rewind to an older checkpoint, left out of the buffer is enqueued again. Idempotent.
-- KEYS     the run
-- ARGV     timeline
-- Returns  1
-- Errors   HR_TIMELINE
--
-- Until this call the run's state says `refill`, so that a trainer killed in the middle does it again, and no training prompt is leased or
-- reserved (laws 1 and 5).
-- uses: _args, _register, _run
register('hr_refilled', {timeline = text}, function(run, call)
  require_timeline(run, call.timeline)
  if run.refill == 1 then
    set(run, 'refill', 0)
    event(run, 'refilled')
    wake(run, 'work')
    wake(run, 'ready')
  end
  return 1
end)
