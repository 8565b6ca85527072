-- publish_metrics: append a step's metrics, for live views. Repeating the step, or an older one, changes nothing.
-- KEYS     the run
-- ARGV     kind (train, validation), step, timeline; then the metrics (msgpack)
-- Returns  1
-- Errors   HR_TIMELINE, HR_INVALID
-- uses: _args, _register, _run

-- the number of newest entries that the stream keeps. A live view needs no more: the journal in the run's folder has all of them.
local KEPT = 1000

register('publish_metrics', {
  kind = one_of({'train', 'validation'}), step = natural, timeline = text,
}, function(run, call, args)
  require_bytes(1, args)
  require_timeline(run, call.timeline)
  if told_before(run, 'published_' .. call.kind, call.step) then return 1 end
  redis.call('XADD', run.key .. ':metrics', 'MAXLEN', KEPT, '*', 'kind', call.kind, 'step', call.step, 'metrics', args[2])
  return 1
end, true)
