-- release_scoring: a scorer starts; what an earlier one had taken waits again at once, without costing an attempt.
-- KEYS     the run
-- ARGV     client (the scorer), number (of this call of it, higher than that of any before)
-- Returns  trajectories still to be released: call again until 0
-- Errors   HR_INVALID
--
-- What the scorer has asked for before comes to nothing if it arrives now. One that arrives again, or late, releases nothing.
-- uses: _args, _register, _run, _scoring
register('release_scoring', {client = name, number = positive}, function(run, call)
  if made_before(run, 'release', call) then return count_taken(run) end
  redis.call('HDEL', run.key .. ':clients', 'taken ' .. call.client)
  made_before(run, 'take', call)
  made_before(run, 'renew', call)
  return void_taken(run)
end)
