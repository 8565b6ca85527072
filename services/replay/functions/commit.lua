-- commit: checkpoint `version` is published; every step < version is trained for good. Idempotent.
-- KEYS     the run
-- ARGV     version, timeline, trained (digest of the batches since the previous commit, made by `digest_of`; '': don't compare)
-- Returns  the number of groups still to be metered and of those whose payloads are still to be freed: repeat the call until 0
-- Errors   HR_TIMELINE, HR_STEP (a step was never reserved, or holds other groups than were trained), HR_INVALID
-- uses: _args, _group, _meter, _register, _run, _steps

-- The digest of the steps that are not committed, each with its groups.
local function digest_of(run, version)
  local found = {}
  for step = math.max(run.committed, 0), version - 1 do
    local ids = step_ids(run, step)
    table.sort(ids)
    found[#found + 1] = step .. '\n' .. table.concat(ids, '\n')
  end
  return redis.sha1hex(table.concat(found, '\n'))
end

-- the fields that meters and `erase` need
local METERED, ERASED = {'state', 'lane', 'n', 'count', 'step'}, {'record', 'n', 'count', 'held'}

-- Meter up to BATCH groups, those to be freed first. Returns how many are left. A rewind may have taken some of them back.
local function meter_tally(run)
  local tally = run.base .. 'tally'
  for _, id in ipairs(redis.call('LPOP', tally, BATCH) or {}) do
    local group = load_group(run, id, METERED)
    if group and group.state == 'reserved' and group.step < run.committed then meter_trained(run, group) end
  end
  return redis.call('LLEN', tally)
end

-- Free up to BATCH groups. Returns how many are left.
local function empty_trash(run)
  local trash = run.base .. 'trash'
  for _, id in ipairs(redis.call('LPOP', trash, BATCH) or {}) do erase(run, load_group(run, id, ERASED)) end
  return redis.call('LLEN', trash)
end

register('commit', {version = natural, timeline = text, trained = text}, function(run, call)
  local version = call.version
  require_timeline(run, call.timeline)
  if version > run.next_step then
    refuse('HR_STEP', 'commit of version ' .. version .. '; only steps below ' .. run.next_step .. ' were reserved')
  end
  -- law 1: a server that lost a step may have reserved it again with other groups, for a copy of `reserve` that arrived late
  if call.trained ~= '' and version > run.committed and call.trained ~= digest_of(run, version) then
    refuse('HR_STEP', 'commit of version ' .. version .. ': the steps from ' .. math.max(run.committed, 0) ..
      ' on are not those that were trained')
  end
  -- the payloads of these steps may go now, although none is freed here (_memory.lua)
  if run.short == 1 and version > run.committed then wake(run, 'work') end
  commit_steps(run, version)
  return meter_tally(run) + empty_trash(run)
end)
