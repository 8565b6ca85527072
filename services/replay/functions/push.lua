-- push: finished trajectories come in, each under its group's lease (law 3). The last one that was started sends the group to scoring.
-- KEYS     the run
-- ARGV     timeline, incarnation, then a line for each trajectory: `<group id> <index> <token> <nonce> <bytes> <length> <oldest>
--          <newest>`: the payload of so many bytes is staged at p:<nonce> with a time to live; length in tokens; weight versions
-- Returns  for each trajectory '' or `<code> <message>`; a refused one leaves nothing behind. The same index again under the same
--          token is accepted and changes nothing.
-- Errors   HR_INVALID (malformed). Of entries: HR_TIMELINE, HR_LEASE_LOST, HR_SURPLUS (the group has its n without it), HR_INVALID

-- The group with what these entries have to know of it: its lease, and which of their indices it has (`mine`) or has dropped (false).
local function load(run, entries_of_group)
  local key = group_key(run, entries_of_group[1].id)
  local fields = {
    'state', 'token', 'lane', 'replica', 'n', 'count', 'dropped', 'pushed', 'actual', 'held', 'oldest', 'newest', 'saves', 'leased',
  }
  for i, entry in ipairs(entries_of_group) do
    fields[13 + 2 * i], fields[14 + 2 * i] = 'p' .. entry.at, 'x' .. entry.at
  end
  local values = redis.call('HMGET', key, unpack(fields))
  if not values[1] then return nil, {} end
  local group = {id = entries_of_group[1].id, key = key}
  for i = 1, 4 do group[fields[i]] = values[i] end
  for i = 5, 14 do group[fields[i]] = tonumber(values[i] or nil) end
  local mine = {}
  for i, entry in ipairs(entries_of_group) do mine[entry.index] = values[13 + 2 * i] or values[14 + 2 * i] end
  return group, mine
end

-- Entries of one group: what is accepted is written once.
local function push(run, entries_of_group, foreign, reply)
  local group, mine = load(run, entries_of_group)
  local written, members, now = {}, {}, string.format('%d', run.now)
  for _, entry in ipairs(entries_of_group) do
    local code, message
    local before = mine[entry.index]
    if foreign then
      code, message = 'HR_TIMELINE', 'a rewind or restore has ended the timeline of group ' .. entry.id
    elseif not (before and group.token == entry.token) then
      code, message = lease_refusal(run, entry, group)
      if not code then code, message = record_refusal(run, entry, group) end
      if not code and redis.call('PERSIST', entry.payload) == 0 then
        code, message = 'HR_INVALID', 'the payload of group ' .. entry.id .. ' was not staged, or its time ran out'
      end
      if not code then
        local latency = math.max(0, run.now - group.leased)
        local value = table.concat({entry.nonce, entry.length, entry.oldest, entry.newest, latency}, ' ')
        mine[entry.index] = value
        written[#written + 1], written[#written + 2] = 'p' .. entry.at, value
        members[#members + 1], members[#members + 2] = now, entry.id .. ':' .. entry.at
        forget_prefix(run, group, entry.index)
        group.pushed, group.actual = group.pushed + 1, group.actual + entry.bytes
        group.oldest = math.min(group.oldest or entry.oldest, entry.oldest)
        group.newest = math.max(group.newest or entry.newest, entry.newest)
      end
    end
    if code then reply[entry.place] = refuse_entry(run, code, message) else reply[entry.place] = '' end
    if code or before then unstage(entry, before) end
  end
  if #written == 0 then return end
  redis.call('HSET', group.key, 'pushed', group.pushed, 'actual', group.actual, 'oldest', group.oldest, 'newest', group.newest,
    unpack(written))
  redis.call('ZADD', run.base .. 'unscored', unpack(members))
  wake(run, 'scoring')
  if group.pushed + group.dropped == group.count then end_generation(run, group) end
end

register('hr_push', nil, function(run, args)
  local count = entries(args, 2, 1, BATCH)
  local staged = run.key .. ':' .. name(args[2], 'incarnation') .. ':p:'
  local groups, by_id = {}, {}
  for i = 1, count do
    local entry = parse_payload(args[2 + i])
    entry.place, entry.payload = i, staged .. entry.nonce
    group_entry(groups, by_id, entry)
  end
  local foreign = run.timeline ~= args[1] or run.incarnation ~= args[2]
  local reply = {}
  for _, of_group in ipairs(groups) do push(run, of_group, foreign, reply) end
  return reply
end)
