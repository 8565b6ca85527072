-- disagreements: record how far the log-probabilities of each replica differ from the trainer's in a step, for people. Repeating the step,
-- or an older one, changes nothing.
-- KEYS     the run
-- ARGV     step, timeline, replicas, errors (one for each: the mean of exp(|rollout - old|) over its tokens)
-- Returns  1; replicas that have left are skipped
-- Errors   HR_TIMELINE, HR_INVALID
-- uses: _args, _fleet, _register, _run
register('disagreements', {
  step = natural, timeline = text, replicas = list_of(name, 64 * BATCH), errors = list_of(finite, 64 * BATCH),
}, function(run, call)
  if #call.replicas ~= #call.errors then refuse('HR_INVALID', #call.errors .. ' errors of ' .. #call.replicas .. ' replicas') end
  require_timeline(run, call.timeline)
  if told_before(run, 'disagreements', call.step) then return 1 end
  for i, id in ipairs(call.replicas) do
    local key = replica_key(run, id)
    if redis.call('EXISTS', key) == 1 then redis.call('HSET', key, 'logprob_error', call.errors[i]) end
  end
  return 1
end)
