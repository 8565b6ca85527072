-- Suspects: groups whose holder died or was silent on them (`suspect` in _group.lua). Any of them may be the reason, so they come before
-- everything else.
--
-- They go in cohorts to a taker that holds nothing, and it gets nothing more until it holds nothing again. If the lowest ticket is a
-- suspect, a taker that holds other groups drains for it.
-- uses: _continuation, _fleet, _group, _taker

-- The next cohort: suspects in ticket order, as many as each of them allows.
local function lease_cohort(run, taker)
  local suspects, ids, most = of_kind(run, 'suspects', taker.kind), {}, taker.most
  for _, id in ipairs(redis.call('ZRANGE', suspects, 0, most - 1)) do
    local group = load_group(run, id)
    most = math.min(most, tonumber(redis.call('HGET', group.key, 'cohort')))
    if #ids >= most or not can_start(run, taker, group) then break end
    redis.call('HDEL', group.key, 'cohort')
    go_on(run, group, taker)
    ids[#ids + 1] = id
  end
  if #ids == 0 then return end
  redis.call('ZREM', suspects, unpack(ids))
  redis.call('HSET', replica_key(run, taker.holder), 'cohort', 1)
  redis.call('UNLINK', of_kind(run, 'drains', taker.kind))
end

-- Whether this taker, which holds groups, gets no more until it has none. True if the lowest ticket is a suspect and no other taker drains.
local function drains(run, taker, suspect_id, ticket)
  if ticket >= 0 and redis.call('ZRANGE', run.base .. 'line', 0, 0)[1] ~= suspect_id then return false end
  local key = of_kind(run, 'drains', taker.kind)
  local other = redis.call('GET', key)
  if other and other ~= taker.holder and may_lease(run, other) then return false end
  redis.call('SET', key, taker.holder)
  return true
end

-- Whether the taker is reserved for suspects: it holds some, got some in this call, or drains for them.
local function set_apart(run, taker)
  local held = redis.call('EXISTS', run.base .. 'h:' .. taker.holder) == 1
  if held and taker.cohort then return true end
  local first, ticket = unpack(redis.call('ZRANGE', of_kind(run, 'suspects', taker.kind), 0, 0, 'WITHSCORES'))
  if first and not may_write(run, taker, load_group(run, first)) then first = nil end  -- another taker takes it
  if first and held then return drains(run, taker, first, tonumber(ticket)) end
  if first then
    lease_cohort(run, taker)
  elseif taker.cohort then
    redis.call('HDEL', replica_key(run, taker.holder), 'cohort')
  end
  return first ~= nil
end
