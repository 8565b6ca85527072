-- commit: checkpoint `version` is published; every step < version is trained for good. Idempotent.
-- KEYS     the run
-- ARGV     version, timeline
-- Returns  groups that are still to be metered, and whose payloads are still to be freed: call again until 0
-- Errors   HR_TIMELINE, HR_STEP (a step that was never reserved), HR_INVALID
-- uses: _args, _register, _run, _steps
register('commit', {version = natural, timeline = text}, function(run, call)
  local version = call.version
  require_timeline(run, call.timeline)
  if version > run.next_step then
    refuse('HR_STEP', 'commit of version ' .. version .. '; only steps below ' .. run.next_step .. ' were reserved')
  end
  commit_steps(run, version)
  return meter_tally(run) + empty_trash(run)
end)
