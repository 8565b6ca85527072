-- heartbeat: keep a replica and its leases alive.
-- KEYS     the run
-- ARGV     replica, number (of this heartbeat, higher than any before), epoch that the caller knows (`<id> <state>`, or ''), tokens of its
--          leases, progress (for each, a count of the tokens sampled since it was given,
--          for it and for earlier leases, see _heartbeat.lua)
-- Returns  msgpack: state, reason (of a quarantine), timeline, epoch_changed (the newest epoch is not the one that the caller knows), lost
--          (tokens that are no longer valid), complete (those of them whose groups are complete: what is still being generated under them
--          is surplus), descends (whether the run's weights descend from those that the replica has verified, or are these)
-- Errors   HR_INVALID
--
-- Renews the replica, and its leases up to their groups' deadlines, which start over where it has progressed (law 6). The reply says if the
-- replica is DEAD, unknown or QUARANTINED. A heartbeat that arrives again, or late, renews nothing.
-- uses: _args, _fleet, _heartbeat, _register, _run

register('heartbeat', {
  replica = name, number = natural, epoch = text, tokens = list_of(name, 4 * BATCH), progress = list_of(natural, 4 * BATCH),
}, function(run, call)
  require_progress(call)
  local id = call.replica
  local state, timeline, newest, reason, version =
    unpack(redis.call('HMGET', replica_key(run, id), 'state', 'timeline', 'heartbeat', 'reason', 'version'))
  local survives = state == 'HEALTHY' and descends(run, timeline, tonumber(version))
  state = state_of(run, state or nil, timeline)
  local there, lost, renewed, complete = takes_part(state), {}, {}, {}
  local is_new = state ~= 'DEAD' and call.number > tonumber(newest or 0)
  for i, token in ipairs(call.tokens) do
    local why = not there and 'lost' or renew(run, id, token, is_new and call.progress[i] or nil, renewed)
    if why then lost[#lost + 1] = token end
    if why == 'complete' then complete[#complete + 1] = token end
  end
  if is_new then live_on(run, id, call.number, renewed) end
  local epoch, epoch_state = unpack(redis.call('HMGET', run.base .. 'epoch', 'id', 'state'))
  local known = epoch and epoch .. ' ' .. epoch_state or ''
  return cmsgpack.pack({
    state = state, reason = state == 'QUARANTINED' and reason or '', timeline = run.timeline, epoch_changed = known ~= call.epoch,
    lost = lost, complete = complete, descends = survives,
  })
end)
