-- finish: end an episode. With its trajectory and the reward it is push and score in one. With only the trajectory it is push, and a grader
-- scores it. A failure ends only this episode.
-- KEYS     the run
-- ARGV     timeline, incarnation, group (its id), order (of a train group; else -1), token, index, tries (how often the episode was begun
--          before), nonce, bytes (of the payload), length (in tokens; 0: there is no trajectory), oldest and newest (weight versions),
--          scores (none, or one: status, and if SCORED reward and build); then the payload ('' where it is staged, or there is none), and
--          the record of the score
-- Returns  1: the episode must start over; 0: it has ended, or its group is no longer the caller's. A repeat of the call changes nothing,
--          even if the group has become ready or was filtered since.
-- Errors   HR_TIMELINE, HR_LEASE_LOST (the episode has started over, or the server lost that write), HR_SURPLUS (the group has its n
--          without it), HR_UNSTAGED, HR_EPISODE_BYTES, HR_INVALID
--
-- Failures are charged to the episode: FAILED and TIMED_OUT cost one of its own `max_attempts`. With the last of them the group fails,
-- unless others were started beyond n. NOT_STARTED costs nothing. INTERRUPTED (its process died, or the connection to it was lost) costs
-- nothing `max_attempts` times, because another episode of that process, or a restart, may be the cause. Each further interruption costs an
-- attempt, until the episode ends in another way. INVALID fails the group at once.
--
-- Law 3: an episode can't be rescored. If another build scores an episode of a group that has scores, the group is generated again. If that
-- happens more than MOST_RESCORED times, builds take turns, and the group fails.
-- A score of build '' comes from no environment (a limit of the run gave it), so it goes with any build.
-- uses: _args, _episode, _group, _payload, _register, _run, _score, _scoring, _trajectory

local CHARGED = {FAILED = true, TIMED_OUT = true}
local FREED = {FAILED = true, TIMED_OUT = true, NOT_STARTED = true, INTERRUPTED = true}

local function parse(run, call, args)
  local score, payload = call.scores[1], args[2]
  if #call.scores > 1 then refuse('HR_INVALID', #call.scores .. ' scores of one episode') end
  require_bytes(1 + #call.scores, args)
  local entry = {
    id = call.group, index = call.index, at = string.format('%d', call.index), token = call.token, nonce = call.nonce, bytes = call.bytes,
    extent = string.format('%d %d %d', call.length, call.oldest, call.newest), oldest = call.oldest, newest = call.newest,
    payload = payload, key = staged_key(run, call.incarnation, call.nonce),
  }
  if payload ~= '' and #payload ~= call.bytes then
    refuse('HR_INVALID', 'the payload of episode ' .. entry.id .. ':' .. entry.at .. ' has ' .. #payload .. ' bytes, not ' .. call.bytes)
  end
  if score then parse_score(run, entry, score, args[3]) end
  local brings = not score or entry.status == 'SCORED'
  if entry.status == 'UNSENDABLE' or brings ~= (call.length > 0) then
    refuse('HR_INVALID', 'an episode cannot end as ' .. (entry.status or 'handed in') .. ' with ' .. call.length .. ' tokens')
  end
  return entry
end

-- Whether the episode's group, which no longer exists, was filtered. Only its order is left.
local function was_filtered(run, order)
  if order < 0 or order > run.enqueued then return false end
  return redis.call('GETBIT', run.base .. 'ended', order) == 1 and redis.call('GETBIT', run.base .. 'failures', order) == 0
end

-- End the episode without a trajectory. Returns whether it starts over.
local function free(run, group, entry)
  local interrupted = CHARGED[entry.status] and 0 or group.interrupted + (entry.status == 'INTERRUPTED' and 1 or 0)
  local charged = CHARGED[entry.status] or entry.status == 'INTERRUPTED' and interrupted > run.max_attempts
  local failures = group.failed + (charged and 1 or 0)
  local reason = entry.status .. ': ' .. words(entry.message)
  if not FREED[entry.status] or failures >= run.max_attempts and charged then
    reason = 'episode ' .. entry.at .. (FREED[entry.status] and ' failed ' .. failures .. ' times: ' or ' was refused: ') .. reason
    if not FREED[entry.status] or group.dropped >= group.count - group.n then
      fail(run, group, reason)
    else
      do_without(run, group, entry.index, reason)
    end
    return 0
  end
  if entry.status ~= 'NOT_STARTED' then note_progress(run, group) end
  forget_prefix(run, group, entry.index)
  redis.call('HSET', group.key, 'a' .. entry.at, tries_value(group.tries + 1, failures, interrupted))
  event(run, 'began_anew', 'group', entry.id, 'index', entry.at, 'reason', reason)
  tell(run, 'began_anew', entry.id, {'i', entry.at}, reason)
  return 1
end

-- The number and name of the build that gave the group's scores; nil if it has none.
local function build_of(group)
  if group.scored == 0 then return -1 end
  local number, build = string.match(redis.call('HGET', group.key, 'build'), '^(%S+) (.*)$')
  return tonumber(number), build
end

local function generate_again(run, group, before, build)
  local reason = 'its episodes were scored by build ' .. show(before) .. ' and then by ' .. show(build) ..
    ', but one build must score a group'
  if redis.call('HINCRBY', group.key, 'rebuilt', 1) > MOST_RESCORED then
    fail(run, group, reason)
  else
    requeue(run, group, 'build', false, reason)
  end
end

-- Store the trajectory, with its score if it has one.
local function take(run, group, entry)
  local env, member, fields = group.env, entry.id .. ':' .. entry.at, {}
  fields[1], fields[2] = 'p' .. entry.at, take_in(run, group, entry)
  if entry.status then
    group.scored = group.scored + 1
    local scored = {
      'r' .. entry.at, entry.reward, 'w' .. entry.at, scoring_value(1, entry.token), 'scored', group.scored, 'build', entry.numbered,
    }
    for _, value in ipairs(scored) do fields[#fields + 1] = value end
    redis.call('SET', score_key(run, entry.nonce), entry.record)
  else
    redis.call('ZADD', place_of(run, 'unscored', env), run.now, member)
    wake(run, 'scoring')
  end
  redis.call('HSET', group.key, 'pushed', group.pushed, 'actual', group.actual, 'oldest', group.oldest, 'newest', group.newest,
    unpack(fields))
  tell(run, 'pushed', entry.id, {'p', entry.at .. ' ' .. entry.extent})
  note_progress(run, group)
  if group.pushed + group.dropped == group.count then
    end_generation(run, group)
    group.state = 'scoring'
  end
  if entry.status then
    local rewarded = entry.at .. ' ' .. string.format('%.17g', entry.reward)
    tell(run, 'scored', entry.id, {'p', rewarded, 'b', string.match(entry.numbered, ' (.*)$')})
  end
  if entry.status and group.scored == group.n then all_scored(run, group) end
  if entry.status then count_scored(run, env, {member}) end
end

-- The reply; or nil, code and message.
local function finish(run, call, entry)
  local group, code, message = episode_of(run, call, entry)
  if not group then
    if code == 'HR_LEASE_LOST' and was_filtered(run, call.order) then return 0 end
    return nil, code, message
  end
  local mine, freed = group.token == entry.token and entry.token ~= '', FREED[entry.status]
  if mine and group.has_ended then return 0 end
  if mine and freed and call.tries < group.tries then return group.state == 'open' and 1 or 0 end
  code, message = episode_refusal(run, call, entry, group)
  if not code and entry.newest > (group.appended or 0) then code, message = weights_refusal(run, call, entry) end
  if not code then code, message = bytes_refusal(run, entry, call.bytes) end
  if code then return nil, code, message end
  if call.length == 0 then return free(run, group, entry) end
  if entry.status then
    local number, build = build_of(group)
    if build and build ~= '' and entry.build ~= '' and build ~= entry.build then
      generate_again(run, group, build, entry.build)
      return 0
    end
    entry.numbered = string.format('%d %s', number, entry.build ~= '' and entry.build or build or '')
  end
  code, message = keep_payload(entry)
  if code then return nil, code, message end
  take(run, group, entry)
  return 0
end

register('finish', {
  timeline = text, incarnation = name, group = name, order = natural_or_none, token = text, index = natural, tries = natural, nonce = name,
  bytes = natural, length = natural, oldest = natural, newest = natural, scores = list_of(map, BATCH),
}, function(run, call, args)
  local entry = parse(run, call, args)
  local reply, code, message = finish(run, call, entry)
  unstage(entry)
  if code then refuse(code, message) end
  return reply
end, true, true)
