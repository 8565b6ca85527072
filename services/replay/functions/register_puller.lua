-- register_puller: add a replica that pulls its weights to the fleet, as STALE. See _offers.lua.
-- KEYS     the run
-- ARGV     replica, incarnation, info: as those of `register`
-- Returns  1; a replica that is in the fleet stays as it is
-- Errors   HR_FENCED (it has left or died), HR_TIMELINE, HR_INVALID
-- uses: _args, _member, _register, _run
register('register_puller', {replica = name, incarnation = text, info = member_info}, function(run, call)
  require_incarnation(run, call.incarnation)
  enter(run, call.replica, 'STALE', 'version', -1, 'timeline', run.timeline, 'info', call.info, 'pulls', 1)
  redis.call('ZADD', run.base .. 'pullers', 'NX', run.now, call.replica)
  return 1
end)
