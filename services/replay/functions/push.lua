-- push: store finished trajectories, each under its group's lease (law 3). The last one that was started sends the group to scoring.
-- KEYS     the run
-- ARGV     timeline, incarnation, the columns of _payload.lua; then the bytes of each trajectory
-- Returns  for each trajectory '' or `<code> <message>`; a refused one leaves nothing behind. A repeat of the same index under the same
--          token is accepted and changes nothing.
-- Errors   HR_INVALID (malformed). Of entries: HR_TIMELINE, HR_LEASE_LOST, HR_SURPLUS (the group has its n without it), HR_UNSTAGED (its
--          staged payload is missing), HR_INVALID
-- uses: _args, _group, _payload, _register, _run

-- The group with what these entries need: its lease, and which of their indices it has (`p<i>`) or has dropped (`x<i>`).
local function load(run, entries_of_group)
  local fields = {
    'state', 'token', 'lane', 'env', 'replica', 'n', 'count', 'dropped', 'pushed', 'actual', 'held', 'oldest', 'newest', 'saves', 'leased',
  }
  local at = #fields
  for i, entry in ipairs(entries_of_group) do fields[at + i] = 'p' .. entry.at end
  local group = load_group(run, entries_of_group[1].id, fields)
  if group and (group.dropped or 0) > 0 then
    for _, entry in ipairs(entries_of_group) do
      group['x' .. entry.at] = redis.call('HGET', group.key, 'x' .. entry.at) or nil
    end
  end
  return group
end

-- Handle the entries of one group. The accepted ones are written together.
local function push(run, call, entries_of_group, reply)
  local group = load(run, entries_of_group)
  local written, members, told, now = {}, {}, {}, string.format('%d', run.now)
  for _, entry in ipairs(entries_of_group) do
    local code, message
    local before = group and (group['p' .. entry.at] or group['x' .. entry.at])
    if not (before and group.token == entry.token) then
      code, message = lease_refusal(run, call, entry, group)
      if not code then code, message = record_refusal(run, entry, group) end
      if not code then code, message = keep_payload(entry) end
      if not code then
        local value = take_in(run, group, entry)
        group['p' .. entry.at] = value
        written[#written + 1], written[#written + 2] = 'p' .. entry.at, value
        members[#members + 1], members[#members + 2] = now, entry.id .. ':' .. entry.at
        told[#told + 1] = entry.at .. ' ' .. entry.extent
      end
    end
    if code then reply[entry.place] = refuse_entry(run, code, message) else reply[entry.place] = '' end
    if code or before then unstage(entry) end
  end
  if #written == 0 then return end
  redis.call('HSET', group.key, 'pushed', group.pushed, 'actual', group.actual, 'oldest', group.oldest, 'newest', group.newest,
    unpack(written))
  tell(run, 'pushed', group.id, {'p', table.concat(told, ',')})
  note_progress(run, group)
  redis.call('ZADD', place_of(run, 'unscored', group.env), unpack(members))
  wake(run, 'scoring')
  if group.pushed + group.dropped == group.count then end_generation(run, group) end
end

register('push', PAYLOADS, function(run, call, args)
  local groups, by_id = {}, {}
  for _, entry in ipairs(parse_payloads(run, call, args)) do group_entry(groups, by_id, entry) end
  local reply = {}
  for _, of_group in ipairs(groups) do push(run, call, of_group, reply) end
  return reply
end, true, true)
