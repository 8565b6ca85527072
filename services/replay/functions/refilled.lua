-- refilled: complete a refill: every prompt that a restore, or a rewind to an older checkpoint, left out of the buffer is enqueued again.
-- Idempotent.
-- KEYS     the run
-- ARGV     timeline
-- Returns  1
-- Errors   HR_TIMELINE, HR_STEP (prompts are still missing: the server lost some of them)
--
-- Until this call the run's state says `refill`, so that a trainer killed half-way refills again. No training prompt is leased or reserved
-- until then (laws 1 and 5).
-- uses: _args, _register, _run
register('refilled', {timeline = text}, function(run, call)
  require_timeline(run, call.timeline)
  if run.refill == 1 then
    -- law 1: every prompt is in the buffer, wanted for a retry, or has ended
    local known = redis.call('ZCARD', run.base .. 'wanted')
    for _, count in pairs(counts_of(run).train or {}) do known = known + count end
    if known <= run.enqueued then
      refuse('HR_STEP', run.enqueued + 1 - known .. ' prompts of the refill are missing; enqueue them again')
    end
    set(run, 'refill', 0)
    event(run, 'refilled')
    wake(run, 'work')
    wake(run, 'ready')
  end
  return 1
end)
