-- score: store the results of the environment. The last score makes the group ready, or filtered (validation: evaluated).
-- KEYS     the run
-- ARGV     scores: for each, group (its id), index, token, status, and if SCORED reward and build (of the environment); then for each its
--          record (msgpack), with a message unless SCORED, and the traceback of the failure if there is one
-- Returns  for each trajectory '' or `<code> <message>`
-- Errors   HR_INVALID (malformed). Of entries: HR_LEASE_LOST
--
-- Law 3: the first n that are scored are the group, which is then ready. The lease ends. Trajectories that are still being generated or
-- wait for a score are surplus and are deleted, and their scores are refused.
--
-- Law 3 too: one build scores a group, so that no advantage compares rewards of two builds. If two builds have scored parts of it, the
-- build whose trajectory was taken later counts. The other build's scores are void, without charging an attempt, and their trajectories
-- wait to be scored again. So an edit costs a group one change, and late scores of the former build change nothing. Builds that keep taking
-- turns open the breaker (_scoring.lua).
--
-- Law 7: only SCORED carries a reward. FAILED, TIMED_OUT, INVALID and INTERRUPTED (its environment died with it alone) are retried until
-- the attempts are used up or the environment's breaker opens (_scoring.lua). Then the trajectory is dropped. UNSENDABLE, which no
-- environment has seen, is dropped at once. The group fails with the message of the trajectory that leaves it with fewer than n.
-- NOT_STARTED costs nothing, and neither does INTERRUPTED if the trajectory was not alone.
--
-- The scores of a call count before its failures: they distinguish a broken environment from a trajectory that it can't score.
--
-- Dynamic sampling (the run's `filter`, see _filter.lua): a train group whose trajectories all have the same reward is filtered here, on
-- its last score, so that it leaves the line at once and another takes its place.
-- uses: _args, _fields, _group, _register, _run, _score, _scoring, _trajectory

-- The group with the holders (`w<i>`), rewards (`r<i>`) and payloads (`p<i>`) of these entries, under those names.
local function load(run, entries_of_group)
  local fields = {'state', 'lane', 'env', 'n', 'count', 'scored', 'ticket', 'build'}
  local at = #fields
  for _, entry in ipairs(entries_of_group) do
    fields[at + 1], fields[at + 2], fields[at + 3] = 'w' .. entry.at, 'r' .. entry.at, 'p' .. entry.at
    at = at + 3
  end
  return load_group(run, entries_of_group[1].id, fields) or {}
end

local function refusal(run, group, entry, token)
  local member = entry.id .. ':' .. entry.at
  if token ~= entry.token then
    return refuse_entry(run, 'HR_LEASE_LOST', 'trajectory ' .. member .. ' is no longer with this scorer')
  end
  if run.backlog and tonumber(redis.call('ZSCORE', place_of(run, 'taken', group.env), member)) <= run.now then
    return refuse_entry(run, 'HR_LEASE_LOST', 'the deadline to score trajectory ' .. member .. ' has passed')
  end
end

-- Sort entries into those with a score (returned first) and those that failed (returned second). The rest already have their answer.
local function sift(run, group, entries_of_group, reply)
  local scored, failed = {}, {}
  for _, entry in ipairs(entries_of_group) do
    local _, token = scoring_of(group['w' .. entry.at])
    local known = group['r' .. entry.at] and token == entry.token  -- the same call again
    reply[entry.place] = not known and refusal(run, group, entry, token) or ''
    if not known and reply[entry.place] == '' then
      local kind = entry.status == 'SCORED' and scored or failed
      kind[#kind + 1] = entry
      group['r' .. entry.at] = entry.reward
    end
  end
  return scored, failed
end

-- Void the earlier scores. Their trajectories wait again.
local function score_again(run, group)
  local records, fields = {}, {}
  local pushed = redis.call('HMGET', group.key, unpack(field_names_of(group, 'p')))
  for i, reward in ipairs(redis.call('HMGET', group.key, unpack(field_names_of(group, 'r')))) do
    if reward then
      records[#records + 1], fields[#fields + 1] = score_key(run, nonce_of(pushed[i])), 'r' .. i - 1
      void_token(run, group.env, group.id .. ':' .. i - 1)
    end
  end
  redis.call('UNLINK', unpack(records))
  redis.call('HDEL', group.key, unpack(fields))
  group.scored = 0
end

-- Law 3: the entries of `scored` from the build that scores the group; the others wait again. Returned second: if another build scored it
-- before, the names of the two.
local function of_one_build(run, group, scored, reply)
  local newest, before = string.match(group.scored > 0 and (group.build or '-1 ') or '', '^(%S+) (.*)$')
  local build = before
  newest = tonumber(newest or -1)
  for _, entry in ipairs(scored) do
    local taken = taken_as(entry.token)
    if taken >= newest then newest, build = taken, entry.build end
  end
  local kept = {}
  for _, entry in ipairs(scored) do
    if entry.build == build then
      kept[#kept + 1] = entry
    else
      void_token(run, group.env, entry.id .. ':' .. entry.at)
      reply[entry.place] = refuse_entry(run, 'HR_LEASE_LOST', 'group ' .. entry.id .. ' is scored by build ' .. show(build) .. ', not ' ..
        show(entry.build))
    end
  end
  -- scores of no build go with any (finish.lua)
  local changed = group.scored > 0 and before ~= '' and build ~= before and {before, build} or nil
  if changed then score_again(run, group) end
  group.build = string.format('%d %s', newest, build)
  return kept, changed
end

-- The members that were scored.
local function write(run, group, scored, reply)
  local fields, records, members, rewarded = {}, {}, {}, {}
  for _ = #scored, group.n - group.scored + 1, -1 do
    local entry = table.remove(scored)
    reply[entry.place] = refuse_entry(run, 'HR_LEASE_LOST', 'group ' .. entry.id .. ' has its ' .. group.n .. ' scores without this one')
  end
  for i, entry in ipairs(scored) do
    fields[2 * i - 1], fields[2 * i] = 'r' .. entry.at, entry.reward
    records[2 * i - 1] = score_key(run, nonce_of(group['p' .. entry.at]))
    records[2 * i] = entry.record
    members[i] = entry.id .. ':' .. entry.at
    rewarded[i] = entry.at .. ' ' .. string.format('%.17g', entry.reward)
  end
  local count = group.scored + #scored
  redis.call('MSET', unpack(records))
  redis.call('HSET', group.key, 'scored', count, 'build', group.build, unpack(fields))
  redis.call('ZREM', place_of(run, 'taken', group.env), unpack(members))
  if #scored > 0 then
    tell(run, 'scored', group.id, {'p', table.concat(rewarded, ','), 'b', string.match(group.build, ' (.*)$')})
  end
  if count == group.n then all_scored(run, group) end
  return members
end

-- The entries of each environment in this call, by its name: `scored` members, with the number of the last taken (`newest`); members that
-- changed the build of their group too often (`turns`); `failed` and `idle` (not begun) entries.
local function of_environment(environments, env)
  environments[env] = environments[env] or {scored = {}, turns = {}, failed = {}, idle = {}}
  return environments[env]
end

-- The entry's group, unless an earlier part of this call has ended it.
local function still_held(run, entry, reply)
  local group = load_group(run, entry.id)
  local taken, reward = unpack(group and redis.call('HMGET', group.key, 'w' .. entry.at, 'r' .. entry.at) or {})
  local _, token = scoring_of(taken)
  if taken and not reward and token == entry.token then return group end
  reply[entry.place] = refuse_entry(run, 'HR_LEASE_LOST', 'group ' .. entry.id .. ' has just ended')
end

local function judge(run, env, results, reply)
  if #results.scored > 0 then count_scored(run, env, results.scored, results.newest) end
  if #results.turns > 0 then builds_take_turns(run, env, results.turns, results.builds) end
  for _, entry in ipairs(results.failed) do
    local group = still_held(run, entry, reply)
    if group and entry.status == 'UNSENDABLE' then
      drop(run, group, entry.index, 'it can\'t be scored: ' .. words(entry.message))
    elseif group then
      fail_scoring(run, group, entry, results.newest)
    end
  end
  local idle = {}
  for _, entry in ipairs(results.idle) do
    if still_held(run, entry, reply) then idle[#idle + 1] = {member = entry.id .. ':' .. entry.at, entry = entry} end
  end
  if #idle > 0 then not_started(run, env, idle, #results.scored + #results.turns + #results.failed > 0) end
end

register('score', {scores = list_of(map, BATCH)}, function(run, call, args)
  require_bytes(#call.scores, args)
  local groups, by_id, reply, environments = {}, {}, {}, {}
  for i, given in ipairs(call.scores) do
    local entry = {id = name(given.group, 'group'), index = natural(given.index, 'index'), token = name(given.token, 'token'), place = i}
    entry.at = tostring(entry.index)
    group_entry(groups, by_id, parse_score(run, entry, given, args[i + 1]))
  end
  for _, of_group in ipairs(groups) do
    local group = load(run, of_group)
    local scored, failed = sift(run, group, of_group, reply)
    if #scored + #failed > 0 then
      local results = of_environment(environments, group.env)
      local changed
      if #scored > 0 then scored, changed = of_one_build(run, group, scored, reply) end
      local takes_turns = changed and rescored_too_often(group)
      if takes_turns then results.builds = changed end
      local members = takes_turns and results.turns or results.scored
      for _, member in ipairs(#scored > 0 and write(run, group, scored, reply) or {}) do members[#members + 1] = member end
      for _, entry in ipairs(takes_turns and {} or scored) do  -- those that were written
        results.newest = math.max(results.newest or 0, taken_as(entry.token))
      end
      for _, entry in ipairs(failed) do
        local kind = entry.status == 'NOT_STARTED' and results.idle or results.failed
        kind[#kind + 1] = entry
      end
    end
  end
  for env, results in pairs(environments) do judge(run, env, results, reply) end
  return reply
end, true)
