-- save: store unfinished trajectories, so that another replica can continue them if the lease is lost.
-- KEYS     the run
-- ARGV     timeline, incarnation, the columns of _payload.lua; then the bytes of each trajectory
-- Returns  for each '' or `<code> <message>`; a refused one leaves nothing behind. A save that is not longer than what is already saved, or
--          whose trajectory has been pushed, changes nothing.
-- Errors   HR_INVALID (malformed). Of entries: HR_TIMELINE, HR_LEASE_LOST, HR_SURPLUS, HR_UNSTAGED, HR_INVALID
--
-- The lease already counts its bytes, as part of the finished trajectory.
-- uses: _group, _payload, _register, _trajectory

local function save(run, call, entry)
  local group = load_group(run, entry.id)
  local code, message = lease_refusal(run, call, entry, group)
  if not code then code, message = record_refusal(run, entry, group) end
  if code then
    unstage(entry)
    return code, message
  end
  local pushed, dropped, saved =
    unpack(redis.call('HMGET', group.key, 'p' .. entry.at, 'x' .. entry.at, 'q' .. entry.at))
  local nonce, length = extent_of(saved)
  if nonce == entry.nonce then return end
  if pushed or dropped or (length and length >= entry.length) then
    unstage(entry)
    return
  end
  code, message = keep_payload(entry)
  if code then return code, message end
  forget_prefix(run, group, entry.index)
  redis.call('HSET', group.key, 'q' .. entry.at, saved_value(entry.nonce, entry.extent), 'saves', (group.saves or 0) + 1)
  note_progress(run, group)
end

register('save', PAYLOADS, function(run, call, args)
  local reply = {}
  for _, entry in ipairs(parse_payloads(run, call, args)) do
    local code, message = save(run, call, entry)
    reply[entry.place] = code and refuse_entry(run, code, message) or ''
  end
  return reply
end, true, true)
