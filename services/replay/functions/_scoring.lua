-- Scoring: the lines in which trajectories wait for their environment, and the breaker of each environment.
--
-- Keys under the run's prefix; the members of places are `<id>:<index>`:
--   environments     set     names of those that groups were enqueued for
--   unscored:<name>  zset    waiting trajectories, by the time from which they may be taken
--   alone:<name>     zset    likewise, those that its process held when it died: any of them may have killed it, so each is sent alone
--   taken:<name>     zset    trajectories with a scorer, by the deadline to which it has renewed them
--   failing:<name>   zset    those of its last WINDOW results that were not a score, by number
--   env:<name>       hash    results: trajectories that it gave a result for since the breaker last closed
--                            works: of all trajectories that it scored, the highest number under which one was taken
--                            not_started: calls in a row of which it began nothing
--                            alone: `<place> <member>`, the trajectory that was last taken alone
--                            repaired: a number: when the breaker was closed by a probe that was not from a new group, or that had failed
--                            before
--                            Only of an open breaker: since, kind, message, traceback, probes (failed in a row), probe_at, group (the
--                            newest that was leased to be the probe), asked (the value of `probes` at that time)
--   broken           zset    environments whose breaker is open, by `since`
-- f<i> of a group: when trajectory i first failed, as the number that the next take gets. `<number> INVALID`: when it was first INVALID,
-- which may be after other failures. A failure up to `repaired` no longer counts.
--
-- Blame: an attempt is charged if the environment raised, gave a bad answer, was late, or died with that trajectory alone. A trajectory
-- that it did not begin, or that went back with its scorer, costs nothing. A failure is the trajectory's own once the environment has
-- scored a trajectory that was taken after the failure. One that was taken before and scored after does not show this: it may have been
-- begun before the environment broke.
--
-- The breaker keeps a broken environment from using up the generated trajectories. It opens
-- - when more than the failure share of the last WINDOW trajectories failed (with fewer than FIRST results, only before one fails for
--   good),
-- - when one would fail for good while others of another group fail too and none that was taken since is scored (a run with few in flight),
-- - when the environment began nothing of NOTHING_BEGUN calls in a row,
-- - or when a group was rescored MOST_RESCORED times because builds take turns (score.lua): it then stays open until a probe changes no
--   build.
-- Opening gives the attempts back. While the breaker is open, one trajectory at a time goes out as a probe, and nothing is charged. The
-- breaker is a lease: it holds until `probe_at`, and each failed probe renews it for longer. Without a scorer it expires, and the next
-- scorer may probe at once. A probe that is scored closes it.
--
-- An environment may fail only on some prompts, and only those may be left. Then each of them would be a failed probe forever. So after
-- FAILED_PROBES failed probes in a row, and again each time that number has doubled, a new group is leased to be the probe, one at a time.
-- If it is scored, the failures of the others are their own. If another trajectory is scored, or one of the new group that had failed, the
-- environment has been repaired, and their failures start over.
--
-- At the end of the run there is no new group. If all that is left kills the environment's process whenever it is sent alone, the probes
-- count as attempts, and these trajectories fail: the process was there each time, and nothing else will show whether it works.
-- uses: _args, _fields, _group, _run, _trajectory

limit('max_scoring_attempts', positive)
limit('scoring_deadline_ms', positive)

local WINDOW, FIRST = 32, 8
-- the number of calls in a row of which an environment begins nothing before its breaker opens
local NOTHING_BEGUN = 3
-- the number of probes that fail in a row before a new group is leased to be the next
local FAILED_PROBES = 3
-- how often a group is rescored because of another build
local MOST_RESCORED = 8
local FIRST_PAUSE_MS, LONGEST_PAUSE_MS = 500, 10000

local function environment_key(run, env)
  return run.base .. 'env:' .. env
end

local function environments_of(run)
  return redis.call('SMEMBERS', run.base .. 'environments')
end

-- The environment's `failure_share` and `give_up_ms` from the run's configuration.
local function setting_of(run, env)
  local packed = redis.call('HGET', run.key, 'environments')
  return packed and cmsgpack.unpack(packed)[env] or {failure_share = 0.5}
end

-- The backoff in ms before try `tries` + 1. It doubles each time, minus a jitter of up to half of it, which is derived from the name.
local function pause_of(what, tries)
  local whole = math.min(FIRST_PAUSE_MS * 2 ^ (tries - 1), LONGEST_PAUSE_MS)
  local jitter = tonumber(string.sub(redis.sha1hex(what .. ' ' .. tries), 1, 4), 16) / 65536
  return math.floor(whole * (1 - jitter / 2))
end

local function is_broken(run, env)
  return redis.call('ZSCORE', run.base .. 'broken', env) ~= false
end

-- Whether any trajectory of the environment waits for a score or is with a scorer.
local function awaits_score(run, env)
  return redis.call('EXISTS', place_of(run, 'unscored', env), place_of(run, 'alone', env), place_of(run, 'taken', env)) > 0
end

-- The place from which `member` was taken alone, or nil.
local function taken_alone_from(run, env, member)
  local place, taken = string.match(redis.call('HGET', environment_key(run, env), 'alone') or '', '^(%a+) (.+)$')
  return taken == member and place or nil
end

-- Put the trajectory back in line, for at least `delay` ms. Without `place`, it returns to the line that it came from.
local function line_up(run, env, member, delay, place)
  place = place or taken_alone_from(run, env, member) or 'unscored'
  redis.call('ZREM', place_of(run, 'taken', env), member)
  redis.call('ZADD', place_of(run, place, env), run.now + delay, member)
  wake(run, 'scoring')
end

-- Void the scorer's token. The trajectory waits again, and no attempt is charged.
local function void_token(run, env, member, delay, place)
  local id, index = split_member(member)
  local key = group_key(run, id)
  local attempts = scoring_of(redis.call('HGET', key, 'w' .. index))
  redis.call('HSET', key, 'w' .. index, scoring_value(attempts - 1))
  line_up(run, env, member, delay or 0, place)
end

-- Give back the attempts of the failing trajectories, because the environment was at fault.
local function forgive(run, env)
  for _, member in ipairs(redis.call('ZRANGE', place_of(run, 'failing', env), 0, -1)) do
    local id, index = split_member(member)
    local key = group_key(run, id)
    local stored = redis.call('HGET', key, 'w' .. index)
    local _, token = scoring_of(stored)
    if stored then redis.call('HSET', key, 'w' .. index, scoring_value(token and 1 or 0, token)) end
  end
  redis.call('UNLINK', place_of(run, 'failing', env))
end

-- Open the breaker. `kind`: FAILING, or NOT_STARTED if the environment began nothing. If it breaks again within WINDOW results, it counts
-- as broken since the first time.
local function open_breaker(run, env, kind, entry)
  forgive(run, env)
  local key = environment_key(run, env)
  local since, results = unpack(redis.call('HMGET', key, 'since', 'results'))
  if not since or tonumber(results or 0) >= WINDOW then since = string.format('%d', run.now) end
  redis.call('ZADD', run.base .. 'broken', since, env)
  redis.call('HSET', key, 'since', since, 'kind', kind, 'message', words(entry.message), 'traceback', words(entry.traceback or ''),
    'probes', 0, 'probe_at', run.now + pause_of(env, 1))
  event(run, 'environment', 'environment', env, 'state', 'broken', 'message', words(entry.message))
  wake(run, 'ready')
end

local function close_breaker(run, env)
  redis.call('ZREM', run.base .. 'broken', env)
  redis.call('HDEL', environment_key(run, env), 'results', 'not_started', 'kind', 'message', 'traceback', 'probes', 'probe_at', 'group',
    'asked')
  event(run, 'environment', 'environment', env, 'state', 'works')
  for _, channel in ipairs({'work', 'ready', 'scoring'}) do wake(run, channel) end
end

-- The probe was not scored: keep the breaker open, for longer.
local function renew_breaker(run, env, entry)
  local key = environment_key(run, env)
  local probes = redis.call('HINCRBY', key, 'probes', 1)
  redis.call('HSET', key, 'probe_at', run.now + pause_of(env, probes + 1), 'message', words(entry.message),
    'traceback', words(entry.traceback or ''))
  wake(run, 'work')  -- a new group may be the next probe
end

-- The number of the take_scoring call that made this token.
local function taken_as(token)
  return tonumber(string.match(token, '%-(%d+)/') or 0)
end

-- `members` of one environment were scored. `newest`: the number under which the last of them was taken, or nil if no scorer took them.
local function count_scored(run, env, members, newest)
  local key = environment_key(run, env)
  if is_broken(run, env) then
    local alone, kind, group = unpack(redis.call('HMGET', key, 'alone', 'kind', 'group'))
    local probe = string.match(alone or '', ' (.+)$')
    local starts_again = kind == 'NOT_STARTED'
    for _, member in ipairs(members) do starts_again = starts_again or member == probe end
    local id, index = split_member(probe or '')
    local is_new = id and id == group and redis.call('HEXISTS', group_key(run, id), 'f' .. index) == 0
    if starts_again and not is_new then redis.call('HSET', key, 'repaired', take_ticket(run)) end
    if starts_again then close_breaker(run, env) end
  end
  redis.call('ZREM', place_of(run, 'failing', env), unpack(members))
  redis.call('HINCRBY', key, 'results', #members)
  redis.call('HDEL', key, 'not_started')
  if newest and newest > tonumber(redis.call('HGET', key, 'works') or -1) then redis.call('HSET', key, 'works', newest) end
end

-- The group is rescored. Returns whether this has happened too often to be explained by edits of the environment.
local function rescored_too_often(group)
  return redis.call('HINCRBY', group.key, 'rescored', 1) > MOST_RESCORED
end

-- `members` changed the build of their group again, the last of them as `builds` says.
local function builds_take_turns(run, env, members, builds)
  local entry = {
    message = 'groups are scored by several builds in turn, the last two ' .. show(builds[1]) .. ' and ' .. show(builds[2]) ..
      ', but one build must score a group; attach or serve one build, or set `build` to a name that changes only when rewards do',
  }
  if not is_broken(run, env) then return open_breaker(run, env, 'BUILDS', entry) end
  for _, member in ipairs(members) do
    if taken_alone_from(run, env, member) then renew_breaker(run, env, entry) end
  end
end

-- Whether a trajectory of a group other than `id` fails as well, and the environment has scored none that was taken since either began to
-- fail. A prompt that can't be scored explains only its own failures.
local function fails_with_others(run, env, id, index)
  local works = tonumber(redis.call('HGET', environment_key(run, env), 'works') or -1)
  local function silent_since(of, at)
    local first = redis.call('HGET', group_key(run, of), 'f' .. at)
    return first and tonumber(string.match(first, '^%d+')) > works
  end
  if not silent_since(id, index) then return false end
  for _, member in ipairs(redis.call('ZRANGE', place_of(run, 'failing', env), 0, -1)) do
    local other, at = split_member(member)
    if other ~= id and silent_since(other, at) then return true end
  end
  return false
end

-- Count the result against the environment. Returns whether the breaker must open for it; a trajectory's own failure (`own`) does not open
-- it. `used_up`: unless it opens, the trajectory fails for good.
local function count_failed(run, env, member, own, used_up)
  local key, failing = environment_key(run, env), place_of(run, 'failing', env)
  local results = tonumber(redis.call('HGET', key, 'results') or 0)
  if redis.call('ZADD', failing, 'NX', results + 1, member) == 1 then results = redis.call('HINCRBY', key, 'results', 1) end
  redis.call('ZREMRANGEBYSCORE', failing, '-inf', results - WINDOW)
  if own then return false end
  local seen = math.min(results, WINDOW)
  if used_up and fails_with_others(run, env, split_member(member)) then return true end
  return (seen >= FIRST or used_up) and redis.call('ZCARD', failing) > setting_of(run, env).failure_share * seen
end

-- The trajectory fails. Returns whether that is its own fault, because the environment scored others that were taken after it first failed
-- or, in this call (`beside`: their number), taken with it or later. Otherwise the environment may be at fault. The first INVALID starts
-- over: earlier failures say nothing about an environment that has refused everything since.
local function fails_by_itself(run, env, group, entry, beside)
  local field = 'f' .. entry.at
  local works, repaired = unpack(redis.call('HMGET', environment_key(run, env), 'works', 'repaired'))
  local first = redis.call('HGET', group.key, field)
  if not first or entry.status == 'INVALID' and not string.find(first, 'INVALID', 1, true)
    or tonumber(string.match(first, '^%d+')) <= tonumber(repaired or -1) then
    local number = beside and beside >= taken_as(entry.token) and beside or run.tickets
    first = string.format('%d', number) .. (entry.status == 'INVALID' and ' INVALID' or '')
    redis.call('HSET', group.key, field, first)
  end
  return tonumber(works or -1) >= tonumber(string.match(first, '^%d+'))
end

-- A failure that may be the environment's gets twice the attempts, until the breaker has decided. An INVALID that is the trajectory's `own`
-- ends it at once.
local function is_used_up(run, entry, attempts, own)
  if not own then return attempts >= 2 * run.max_scoring_attempts end
  return entry.status == 'INVALID' or attempts >= run.max_scoring_attempts
end

-- How many groups of the lane are in the state, what this call has changed included.
local function count_in(run, lane, state)
  local field = lane .. ':' .. state
  return tonumber(redis.call('HGET', run.base .. 'counts', field) or 0) + (run.deltas[field] or 0)
end

-- Whether the trajectories that killed the environment's process are all that it will ever be sent: no prompt of it will come, none may be
-- being generated, and nothing else waits. Prompts of other environments may be queued: the trainer may be waiting for these trajectories
-- before there is room for them.
local function is_left_with_killers(run, env)
  if run.closed == 0 or redis.call('EXISTS', run.base .. 'wanted', place_of(run, 'unscored', env)) > 0 then return false end
  if redis.call('ZCARD', place_of(run, 'taken', env)) > 1 then return false end
  local queue = redis.call('ZRANGE', queue_of(run, 'train'), 0, -1)
  local coming = count_in(run, 'train', 'open') + count_in(run, 'train', 'queued') - #queue  -- and those that were passed over
  for _, state in ipairs({'queued', 'open'}) do coming = coming + count_in(run, 'validation', state) end
  if coming > 0 then return false end
  for _, id in ipairs(queue) do
    if load_group(run, id, {'env'}).env == env then return false end
  end
  return true
end

-- Handle a result that is not a score, for a trajectory that the environment began. `beside`: of the trajectories that it scored in this
-- call, the highest number under which one was taken.
local function fail_scoring(run, group, entry, beside)
  local env, member = group.env, group.id .. ':' .. entry.at
  local alone = taken_alone_from(run, env, member)
  local place = entry.status == 'INTERRUPTED' and 'alone' or nil
  redis.call('HDEL', environment_key(run, env), 'not_started')
  if is_broken(run, env) and redis.call('HGET', environment_key(run, env), 'kind') == 'NOT_STARTED' then close_breaker(run, env) end
  if is_broken(run, env) and alone then renew_breaker(run, env, entry) end
  if entry.status == 'INTERRUPTED' and not alone then return void_token(run, env, member, 0, place) end
  local own = fails_by_itself(run, env, group, entry, beside)
  local broken = is_broken(run, env)
  local killer = broken and place and is_left_with_killers(run, env)
  if broken and not killer then return void_token(run, env, member, 0, place) end
  local attempts = scoring_of(redis.call('HGET', group.key, 'w' .. entry.at))
  local used_up = is_used_up(run, entry, attempts, own)
  if not broken and count_failed(run, env, member, own, used_up) then
    open_breaker(run, env, 'FAILING', entry)
    return void_token(run, env, member, 0, place)
  end
  local message = entry.status .. ': ' .. words(entry.message) ..
    (killer and '; it was alone each time, and no other trajectory is left that could show that the environment works' or '')
  if used_up and entry.status == 'INVALID' then return drop(run, group, entry.index, 'scoring refused: ' .. message) end
  if used_up then return drop(run, group, entry.index, 'scoring failed ' .. attempts .. ' times: ' .. message) end
  redis.call('HSET', group.key, 'w' .. entry.at, scoring_value(attempts))
  line_up(run, env, member, pause_of(member, attempts), place)
end

-- Handle entries of a call ({member, entry} each) that the environment did not begin. `begun`: it began others of the call.
local function not_started(run, env, entries, begun)
  local key, tries = environment_key(run, env), 1
  local broken = is_broken(run, env)
  if not broken and not begun then
    tries = redis.call('HINCRBY', key, 'not_started', 1)
    if tries >= NOTHING_BEGUN then open_breaker(run, env, 'NOT_STARTED', entries[1].entry) end
  end
  for _, each in ipairs(entries) do
    if broken and taken_alone_from(run, env, each.member) then renew_breaker(run, env, each.entry) end
    void_token(run, env, each.member, broken and 0 or pause_of(each.member, tries))
  end
end

-- The newest group that was leased to be the probe of a broken environment: its state, whether a trajectory of it has failed, and a waiting
-- trajectory that has not (member and time).
local function probe_group(run, env)
  local id = redis.call('HGET', environment_key(run, env), 'group')
  local group = id and load_group(run, id, {'state', 'n', 'count'})
  if not group then return nil end
  local failed, untried = false, nil
  for i, first in ipairs(redis.call('HMGET', group.key, unpack(field_names_of(group, 'f')))) do
    failed = failed or first ~= false
    local member = id .. ':' .. i - 1
    local since = not (first or untried) and redis.call('ZSCORE', place_of(run, 'unscored', env), member)
    if since and tonumber(since) <= run.now then untried = {member, since} end
  end
  return group.state, failed, untried
end

-- What a scorer with room for `most` trajectories may take now: from which place, how many, whether to send it alone, and, if it is not the
-- first in line, which one (member and time).
local function allowance(run, env, most)
  local key, taken = environment_key(run, env), place_of(run, 'taken', env)
  local alone, probe_at = unpack(redis.call('HMGET', key, 'alone', 'probe_at'))
  local broken = is_broken(run, env)
  local function first(place)
    local found = redis.call('ZRANGEBYSCORE', place_of(run, place, env), '-inf', run.now, 'WITHSCORES', 'LIMIT', 0, 1)
    return tonumber(found[2] or math.huge)
  end
  local suspected_at = first('alone')
  if not broken and suspected_at == math.huge then
    if not alone then return 'unscored', most end
    if redis.call('ZSCORE', taken, string.match(alone, ' (.+)$')) then return 'unscored', 0 end
    redis.call('HDEL', key, 'alone')
    return 'unscored', most
  end
  if redis.call('EXISTS', taken) == 1 or (broken and run.now < tonumber(probe_at)) then return 'unscored', 0 end
  local untried = broken and select(3, probe_group(run, env))
  if untried then return 'unscored', 1, true, untried end
  local suspected = not broken or suspected_at <= first('unscored')
  return suspected and 'alone' or 'unscored', 1, true
end

-- Whether a group of the environment may be leased. If the environment is broken, a group may only be leased to be its probe, and only if
-- nothing else is left to send or too many probes have failed, and no earlier probe group is being generated or still has to be tried.
local function may_generate(run, env)
  if not is_broken(run, env) then return true end
  local kind, probes, asked = unpack(redis.call('HMGET', environment_key(run, env), 'kind', 'probes', 'asked'))
  local enough = kind == 'FAILING' and tonumber(probes) >= math.max(FAILED_PROBES, 2 * tonumber(asked or 0))
  if awaits_score(run, env) and not enough then return false end
  local state, failed = probe_group(run, env)
  return state ~= 'open' and (state ~= 'scoring' or failed)
end

-- The group is leased. If its environment is broken, it is the probe.
local function begin_probe(run, env, id)
  if not is_broken(run, env) then return end
  local key = environment_key(run, env)
  redis.call('HSET', key, 'group', id, 'asked', redis.call('HGET', key, 'probes'))
end

-- The number of trajectories that scorers hold.
local function count_taken(run)
  local count = 0
  for _, env in ipairs(environments_of(run)) do count = count + redis.call('ZCARD', place_of(run, 'taken', env)) end
  return count
end

-- Void the tokens of up to BATCH trajectories that scorers hold. Returns how many are left.
local function void_taken(run)
  local room = BATCH
  for _, env in ipairs(environments_of(run)) do
    local members = redis.call('ZRANGE', place_of(run, 'taken', env), 0, room - 1)
    if room <= 0 then members = {} end
    for _, member in ipairs(members) do void_token(run, env, member) end
    room = room - #members
  end
  return count_taken(run)
end
