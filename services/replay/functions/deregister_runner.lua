-- deregister_runner: a runner leaves.
-- KEYS     the run
-- ARGV     runner, died (it ends for an error)
-- Returns  groups it still holds: call again until 0. What it held is passed on without costing an attempt; if it died, as after a heartbeat
--          that was lost (`suspect` in _group.lua).
-- Errors   HR_INVALID
-- uses: _args, _fleet, _member, _register
register('deregister_runner', {runner = name, died = flag}, function(run, call)
  return leave_fleet(run, runner_name(call.runner), call.died)
end)
