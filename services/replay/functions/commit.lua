-- commit: checkpoint `version` is published; every step < version is trained for good. Idempotent.
-- KEYS     the run
-- ARGV     version, timeline
-- Returns  groups that are still to be metered, and whose payloads are still to be freed: call again until 0
-- Errors   HR_TIMELINE, HR_STEP (a step that was never reserved), HR_INVALID
register('hr_commit', 2, function(run, args)
  local version = natural(args[1], 'version')
  require_timeline(run, args[2])
  if version > run.next_step then
    refuse('HR_STEP', 'commit of version ' .. version .. '; only steps below ' .. run.next_step .. ' were reserved')
  end
  commit_steps(run, version)
  return meter_tally(run) + empty_trash(run)
end)
