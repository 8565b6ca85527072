-- register_runner: add a runner. It leases episodes, and is in no epoch.
-- KEYS     the run
-- ARGV     runner (a nonce, never used again once it has left or died), incarnation, info (what people see of it: names, each with a text,
--          a number or a flag)
-- Returns  1; a runner that is already registered stays as it is
-- Errors   HR_FENCED (it has left or died), HR_TIMELINE, HR_INVALID
-- uses: _args, _fleet, _member, _register, _run
register('register_runner', {runner = name, incarnation = text, info = member_info}, function(run, call)
  require_incarnation(run, call.incarnation)
  enter(run, runner_name(call.runner), 'ALIVE', 'info', call.info)
  return 1
end)
