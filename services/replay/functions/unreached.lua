-- unreached: another replica that pulls could not reach this one. People see it for ten minutes.
-- KEYS     the run
-- ARGV     client, number (of this client's call, higher than any before), replica (that was not reached), reason
-- Returns  1; 0 if it is not in the fleet, or does not pull. A call that arrives again, or late, changes nothing
-- Errors   HR_INVALID
-- uses: _args, _fleet, _register, _run
register('unreached', {client = name, number = positive, replica = name, reason = text}, function(run, call)
  if made_before(run, 'unreached', call) or not pulls_weights(run, call.replica) then return 0 end
  redis.call('HSET', replica_key(run, call.replica), 'unreached', words(call.reason, 300), 'unreached_at', run.now)
  return 1
end)
