-- restore: start a new incarnation, because the server lost writes. It knows only checkpoint `version`, the prompts taken so far, and those
-- that ended as failed or filtered. The caller enqueues again (refill) the others that its ledger does not hold. Everything of the old
-- incarnation becomes unreachable at once: it is under another prefix, which the client sweeps. A repeat under the same incarnation is a
-- no-op.
-- KEYS     the run
-- ARGV     version, timeline, incarnation (new nonces), enqueued (highest order taken; -1: none), failed, filtered (how many groups); then
--          the bitmaps of both, and of those that failed
-- Returns  the run's state, msgpack
-- Errors   HR_TIMELINE: this timeline or incarnation has ended; HR_INVALID
-- uses: _args, _register, _run

-- The groups that ended, as recorded in the checkpoint.
local function take_over_ended(run, failed, filtered, bitmap, failures)
  if #bitmap > 0 then redis.call('SET', run.base .. 'ended', bitmap) end
  if #failures > 0 then redis.call('SET', run.base .. 'failures', failures) end
  if failed > 0 then move(run, 'train', nil, 'failed', failed) end
  if filtered > 0 then move(run, 'train', nil, 'filtered', filtered) end
end

register('restore', {
  version = natural, timeline = name, incarnation = name, enqueued = natural_or_none, failed = natural, filtered = natural,
}, function(run, call, args)
  require_bytes(2, args)
  local version, timeline, incarnation, enqueued = call.version, call.timeline, call.incarnation, call.enqueued
  if incarnation == run.incarnation then return cmsgpack.pack(run_state(run)) end
  require_unused(run, incarnation)
  require_unused(run, timeline)
  retire(run, run.incarnation)
  retire(run, run.timeline)
  for _, registry in ipairs({'replicas', 'runners'}) do
    for _, member in ipairs(redis.call('ZRANGE', run.base .. registry, 0, -1)) do retire(run, member) end
  end
  redis.call('SADD', run.key .. ':old', run.incarnation)
  run.deltas, run.bytes_delta = {}, 0
  run.timeline, run.incarnation, run.base = timeline, incarnation, run.key .. ':' .. incarnation .. ':'
  run.next_step, run.committed, run.enqueued, run.closed, run.due = version, version, enqueued, 0, 1e15
  redis.call('HSET', run.key, 'timeline', timeline, 'incarnation', incarnation, 'next_step', version, 'committed', version,
    'enqueued', enqueued, 'closed', 0, 'tickets', 0, 'pinned', 0, 'top', version, 'evicted', version, 'freed', version, 'refill', 1,
    'bytes', 0, 'due', 1e15, 'validation', 0)
  run.refill = 1
  begin_timeline(run, version, timeline)
  take_over_ended(run, call.failed, call.filtered, args[2], args[3])
  move(run, 'train', nil, 'trained', version * run.prompts_per_step)
  event(run, 'restored', 'version', version, 'incarnation', incarnation)
  tell(run, 'restored', '', {'v', version, 't', timeline})
  for _, channel in ipairs({'work', 'ready', 'epoch'}) do wake(run, channel) end
  return cmsgpack.pack(run_state(run))
end, true)
