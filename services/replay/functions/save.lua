-- save: unfinished trajectories come in, so that another replica can go on from there should the lease be lost.
-- KEYS     the run
-- ARGV     timeline, incarnation, the columns of _payload.lua; then the bytes of each trajectory
-- Returns  for each '' or `<code> <message>`; a refused one leaves nothing behind. One that is not longer than what is saved already, or whose
--          trajectory is in, changes nothing.
-- Errors   HR_INVALID (malformed). Of entries: HR_TIMELINE, HR_LEASE_LOST, HR_SURPLUS, HR_UNSTAGED, HR_INVALID
--
-- Its bytes are those that the lease counts for the finished trajectory.
-- uses: _group, _payload, _register

local function save(run, entry)
  local group = load_group(run, entry.id)
  local code, message = lease_refusal(run, entry, group)
  if not code then code, message = record_refusal(run, entry, group) end
  if code then
    unstage(entry)
    return code, message
  end
  local pushed, dropped, saved =
    unpack(redis.call('HMGET', group.key, 'p' .. entry.at, 'x' .. entry.at, 'q' .. entry.at))
  local nonce, length = string.match(saved or '', '^(%S+) (%d+)')
  if nonce == entry.nonce then return end
  if pushed or dropped or (length and tonumber(length) >= entry.length) then
    unstage(entry)
    return
  end
  code, message = keep_payload(entry)
  if code then return code, message end
  forget_prefix(run, group, entry.index)
  redis.call('HSET', group.key, 'q' .. entry.at, entry.nonce .. ' ' .. entry.extent, 'saves', (group.saves or 0) + 1)
end

register('save', PAYLOADS, function(run, call, args)
  local all = parse_payloads(run, call, args)
  local foreign = is_foreign(run, call)
  local reply = {}
  for _, entry in ipairs(all) do
    local code, message
    if foreign then
      code, message = 'HR_TIMELINE', 'a rewind or restore has ended the timeline of group ' .. entry.id
      unstage(entry)
    else
      code, message = save(run, entry)
    end
    reply[entry.place] = code and refuse_entry(run, code, message) or ''
  end
  return reply
end, true, true)
