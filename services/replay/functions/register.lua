-- register: add a replica to the fleet as STALE, or as LOADING while its engine is not up.
-- KEYS     the run
-- ARGV     replica (a nonce, never used again once it has left or died), incarnation, info (what people see of it: names, each with a text,
--          a number or a flag), loading
-- Returns  1; a replica that is in the fleet stays as it is
-- Errors   HR_FENCED (it has left or died), HR_TIMELINE, HR_INVALID
-- uses: _args, _member, _register, _run
register('register', {replica = name, incarnation = text, info = member_info, loading = flag}, function(run, call)
  require_incarnation(run, call.incarnation)
  enter(run, call.replica, call.loading and 'LOADING' or 'STALE', 'version', -1, 'timeline', run.timeline, 'info', call.info)
  return 1
end)
