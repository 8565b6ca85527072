-- deregister_runner: a runner leaves.
-- KEYS     the run
-- ARGV     runner, died (it ends because of an error)
-- Returns  the number of groups that it still holds: repeat the call until 0. Its groups are passed on without charging an attempt. If it
--          died, they are treated as after a lost heartbeat (`suspect` in _group.lua).
-- Errors   HR_INVALID
-- uses: _args, _fleet, _member, _register
register('deregister_runner', {runner = name, died = flag}, function(run, call)
  return leave_fleet(run, runner_name(call.runner), call.died)
end)
