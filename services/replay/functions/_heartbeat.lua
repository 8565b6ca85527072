-- Heartbeats, by which a replica (heartbeat.lua) and a runner (runner_heartbeat.lua) keep themselves and their leases alive.
-- uses: _fleet, _group

-- A heartbeat renews a lease up to its group's deadline. Returns nothing if it did, else `lost` or `complete`. With `complete`, the group
-- is complete and what is still being generated under the lease is surplus.
local function renew(run, holder, token, renewed)
  local group = string.match(token, '^[^/]+/(.+)$')
  local state, current, deadline, replica, n, count =
    unpack(redis.call('HMGET', group_key(run, group or ''), 'state', 'token', 'deadline', 'replica', 'n', 'count'))
  if current ~= token then return 'lost' end
  if state ~= 'open' or replica ~= holder then return state ~= 'scoring' and n ~= count and 'complete' or nil end
  if lease_over(run, group) then return 'lost' end
  renewed[#renewed + 1] = math.min(run.now + run.lease_ms, tonumber(deadline))
  renewed[#renewed + 1] = group
end

-- Keep the member alive, and the leases that its heartbeat `renewed`.
local function live_on(run, holder, number, renewed)
  if #renewed > 0 then redis.call('ZADD', run.base .. 'leases', unpack(renewed)) end
  see(run, holder, 'heartbeat', number, 'together', redis.call('SCARD', run.base .. 'h:' .. holder))
end
