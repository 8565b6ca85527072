-- release_scoring: a scorer starts. Trajectories that an earlier one had taken wait again at once, without charging an attempt.
-- KEYS     the run
-- ARGV     client (the scorer), number (of this client's call, higher than any before)
-- Returns  the number of trajectories still to be released: repeat the call until 0
-- Errors   HR_INVALID
--
-- Earlier calls of the scorer have no effect if they arrive after this one. A call that arrives again, or late, releases nothing.
-- uses: _args, _register, _run, _scoring
register('release_scoring', {client = name, number = positive}, function(run, call)
  if made_before(run, 'release', call) then return count_taken(run) end
  redis.call('HDEL', run.key .. ':clients', 'taken ' .. call.client)
  made_before(run, 'take', call)
  made_before(run, 'renew', call)
  return void_taken(run)
end)
