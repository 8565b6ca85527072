-- heartbeat: a replica lives, and so do its leases.
-- KEYS     the run
-- ARGV     replica, epoch the caller knows (`<id> <state>`, or ''), tokens of its leases
-- Returns  state, timeline, 1 if the newest epoch is another than the caller knows, tokens that are no longer valid, those of them whose
--          groups are complete (what is still being generated under them is surplus)
-- Errors   HR_INVALID
--
-- Renews the replica, and its leases up to their groups' absolute deadlines (law 6). DEAD and unknown replicas are told so.
local function renew(run, id, token, renewed, complete)
  local group = string.match(token, '^[^/]+/(.+)$')
  local state, current, deadline, replica, n, count =
    unpack(redis.call('HMGET', group_key(run, group or ''), 'state', 'token', 'deadline', 'replica', 'n', 'count'))
  if current ~= token then return false end
  if state ~= 'open' or replica ~= id then
    local surplus = state ~= 'scoring' and n ~= count
    if surplus then complete[#complete + 1] = token end
    return not surplus
  end
  if lease_over(run, group) then return false end
  renewed[#renewed + 1] = math.min(run.now + run.lease_ms, tonumber(deadline))
  renewed[#renewed + 1] = group
  return true
end

register('hr_heartbeat', nil, function(run, args)
  entries(args, 2, 1, 4 * BATCH)
  local id = name(args[1], 'replica')
  for i = 3, #args do name(args[i], 'token') end
  local state, timeline = unpack(redis.call('HMGET', replica_key(run, id), 'state', 'timeline'))
  state = state_of(run, state or nil, timeline)
  local lost, renewed, complete = {}, {}, {}
  for i = 3, #args do
    if state == 'DEAD' or not renew(run, id, args[i], renewed, complete) then lost[#lost + 1] = args[i] end
  end
  if #renewed > 0 then redis.call('ZADD', run.base .. 'leases', unpack(renewed)) end
  if state ~= 'DEAD' then see(run, id) end
  local epoch, epoch_state = unpack(redis.call('HMGET', run.base .. 'epoch', 'id', 'state'))
  local known = epoch and epoch .. ' ' .. epoch_state or ''
  return {state, run.timeline, known ~= args[2] and 1 or 0, lost, complete}
end)
