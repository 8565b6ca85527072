-- runner_heartbeat: keep a runner and its leases alive.
-- KEYS     the run
-- ARGV     runner, number (of this heartbeat, higher than any before), tokens of its leases (MOST_SLOTS in headrace/config/agents.py),
--          progress (for each, a count that rises while one of its programs runs within its clocks, see _heartbeat.lua)
-- Returns  msgpack: alive, timeline, lost (tokens that are no longer valid), complete (those of them whose groups are complete), surplus
--          (of these, token and index of each episode that has not ended)
-- Errors   HR_INVALID
--
-- Renews the runner, and its leases up to their groups' deadlines, which start over where it has progressed (law 6). The reply says if the
-- runner is DEAD or unknown. A heartbeat that arrives again, or late, renews nothing.
-- uses: _args, _fields, _fleet, _group, _heartbeat, _register

-- Episodes of a complete group that have not ended.
local function add_surplus(run, token, surplus)
  local group = load_group(run, string.match(token, '^[^/]+/(.+)$'), {'state', 'n', 'count'})
  local ended = redis.call('HMGET', group.key, unpack(field_names_of(group, 'px')))
  for index = 0, group.count - 1 do
    if not ended[index + 1] and not ended[group.count + index + 1] then surplus[#surplus + 1] = {token, index} end
  end
end

register('runner_heartbeat', {
  runner = name, number = natural, tokens = list_of(name, 16 * BATCH), progress = list_of(natural, 16 * BATCH),
}, function(run, call)
  require_progress(call)
  local holder = runner_name(call.runner)
  local state, newest = unpack(redis.call('HMGET', replica_key(run, holder), 'state', 'heartbeat'))
  local alive, lost, renewed, complete, surplus = state == 'ALIVE', {}, {}, {}, {}
  local is_new = alive and call.number > tonumber(newest or 0)
  for i, token in ipairs(call.tokens) do
    local why = not alive and 'lost' or renew(run, holder, token, is_new and call.progress[i] or nil, renewed)
    if why then lost[#lost + 1] = token end
    if why == 'complete' then
      complete[#complete + 1] = token
      add_surplus(run, token, surplus)
    end
  end
  if is_new then live_on(run, holder, call.number, renewed) end
  return cmsgpack.pack({alive = alive, timeline = run.timeline, lost = lost, complete = complete, surplus = surplus})
end)
