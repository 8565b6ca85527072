-- save: unfinished trajectories come in, so that another replica can go on from there should the lease be lost.
-- KEYS     the run
-- ARGV     timeline, incarnation, then a line for each as in push
-- Returns  for each '' or `<code> <message>`; a refused one leaves nothing behind. One that is not longer than what is saved already, or whose
--          trajectory is in, changes nothing.
-- Errors   HR_INVALID (malformed). Of entries: HR_TIMELINE, HR_LEASE_LOST, HR_SURPLUS, HR_INVALID
--
-- Its bytes are those that the lease counts for the finished trajectory.

local function save(run, entry)
  local group = load_group(run, entry.id)
  local code, message = lease_refusal(run, entry, group)
  if not code then code, message = record_refusal(run, entry, group) end
  if code then
    unstage(entry, group and redis.call('HGET', group.key, 'q' .. entry.at))
    return code, message
  end
  local pushed, dropped, saved =
    unpack(redis.call('HMGET', group.key, 'p' .. entry.at, 'x' .. entry.at, 'q' .. entry.at))
  local nonce, length = string.match(saved or '', '^(%S+) (%d+)')
  if nonce == entry.nonce then return end
  if pushed or dropped or (length and tonumber(length) >= entry.length) then
    redis.call('UNLINK', entry.payload)
    return
  end
  if redis.call('PERSIST', entry.payload) == 0 then
    return 'HR_INVALID', 'the payload of group ' .. entry.id .. ' was not staged, or its time ran out'
  end
  forget_prefix(run, group, entry.index)
  redis.call('HSET', group.key, 'q' .. entry.at,
    entry.nonce .. ' ' .. entry.length .. ' ' .. entry.oldest .. ' ' .. entry.newest, 'saves', (group.saves or 0) + 1)
end

register('hr_save', nil, function(run, args)
  local count = entries(args, 2, 1, BATCH)
  local staged = run.key .. ':' .. name(args[2], 'incarnation') .. ':p:'
  local all = {}
  for i = 1, count do
    all[i] = parse_payload(args[2 + i])
    all[i].payload = staged .. all[i].nonce
  end
  local foreign = run.timeline ~= args[1] or run.incarnation ~= args[2]
  local reply = {}
  for i, entry in ipairs(all) do
    local code, message
    if foreign then
      code, message = 'HR_TIMELINE', 'a rewind or restore has ended the timeline of group ' .. entry.id
      redis.call('UNLINK', entry.payload)
    else
      code, message = save(run, entry)
    end
    reply[i] = code and refuse_entry(run, code, message) or ''
  end
  return reply
end)
