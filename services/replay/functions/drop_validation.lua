-- drop_validation: delete every group of validations of versions < before, whether leased or not, with its payloads. None can be added
-- afterwards. For a validation of version `before` that runs beside training, it names the replicas that lease its groups.
-- KEYS     the run
-- ARGV     client, number (of this client's call, higher than any before), timeline, before, validators (replicas; those that don't hold
--          version `before`, or pull their weights, are left out, and those named before stay)
-- Returns  the number of groups still to be dropped: repeat the call until 0. A call that arrives again, or late, names no validators
-- Errors   HR_TIMELINE, HR_INVALID
-- uses: _args, _epoch, _fleet, _register, _run, _validation
register('drop_validation', {
  client = name, number = positive, timeline = text, before = natural, validators = list_of(name, BATCH),
}, function(run, call)
  require_timeline(run, call.timeline)
  local late = made_before(run, 'drop_validation', call)
  if call.before > (run.validation or 0) then
    set(run, 'validation', call.before)
    redis.call('UNLINK', run.base .. 'validators')
  end
  if not late and call.before == (run.validation or 0) then
    for _, id in ipairs(call.validators) do
      if holds(run, id, {version = call.before, timeline = run.timeline}) and not pulls_weights(run, id) then
        redis.call('SADD', run.base .. 'validators', id)
        redis.call('SREM', run.base .. 'waiting', id)  -- for no training group any more
      end
    end
  end
  wake(run, 'work')
  return drop_validation(run, BATCH, call.before)
end)
