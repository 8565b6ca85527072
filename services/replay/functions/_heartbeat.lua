-- Heartbeats, by which a replica (heartbeat.lua) and a runner (runner_heartbeat.lua) keep themselves and their leases alive.
--
-- Law 6: a heartbeat alone is not progress, so it renews a lease only up to its group's deadline. It also says how far the holder has come
-- under each lease, as a count: what a replica has sampled, or in how many of a runner's heartbeats one of its programs ran within its
-- clocks. The
-- group progresses if the count is higher than any before under this lease.
-- uses: _args, _fleet, _group

local function require_progress(call)
  if #call.progress ~= #call.tokens then refuse('HR_INVALID', #call.tokens .. ' leases, and progress of ' .. #call.progress) end
end

-- A heartbeat renews a lease up to its group's deadline. Returns nothing if it did, else `lost` or `complete`. With `complete`, the group
-- is complete and what is still being generated under the lease is surplus. `progress`: nil in a call that arrives late.
local function renew(run, holder, token, progress, renewed)
  local id = string.match(token, '^[^/]+/(.+)$')
  local key = group_key(run, id or '')
  local state, current, deadline, replica, n, count, known =
    unpack(redis.call('HMGET', key, 'state', 'token', 'deadline', 'replica', 'n', 'count', 'progress'))
  if current ~= token then return 'lost' end
  if state ~= 'open' or replica ~= holder then return state ~= 'scoring' and n ~= count and 'complete' or nil end
  if lease_over(run, id) then return 'lost' end
  if not progress then return end
  local moves = progress > tonumber(known or 0)
  renewed[#renewed + 1] = moves and advance(run, key, progress) or lease_end(run, tonumber(deadline))
  renewed[#renewed + 1] = id
end

-- Keep the member alive, and the leases that its heartbeat `renewed`.
local function live_on(run, holder, number, renewed)
  if #renewed > 0 then redis.call('ZADD', run.base .. 'leases', unpack(renewed)) end
  see(run, holder, 'heartbeat', number, 'together', redis.call('SCARD', run.base .. 'h:' .. holder))
end
