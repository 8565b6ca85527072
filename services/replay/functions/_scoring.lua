-- Scoring: the lines in which trajectories wait for their environment, and the breaker of each environment.
--
-- Keys under the run's prefix; the members of places are `<id>:<index>`:
--   environments     set     names of those that groups were enqueued for
--   unscored:<name>  zset    trajectories that wait, by the time from which they may be taken
--   alone:<name>     zset    likewise, those that its process held when it died: any of them may have killed it, so each is sent alone
--   taken:<name>     zset    trajectories with a scorer, by the deadline up to which it has renewed them
--   failing:<name>   zset    those of its last WINDOW results that were no score, by number
--   env:<name>       hash    results (trajectories that it gave one for, since the breaker last closed), scored (of all, ever), not_started
--                            (calls in a row of which it began nothing), alone (`<place> <member>`: the one that was last taken alone); of
--                            an open breaker since, kind, message, traceback, probes (failed in a row), probe_at, group (leased to be the
--                            probe)
--   broken           zset    environments whose breaker is open, by `since`
-- f<i> of a group: what `scored` was when trajectory i first failed.
--
-- Blame: an attempt is charged where the environment raised, answered badly, was late, or died with that trajectory alone. What it did not
-- begin, or what went back with its scorer, costs nothing.
--
-- The breaker keeps a broken environment from using up what is generated. It opens when more than the failure share of the last WINDOW
-- trajectories failed (of fewer than FIRST only before one of them fails for good), when one would fail for good, others of another group fail
-- and none was scored since they began to (a run that has few in flight), or when it began nothing of NOTHING_BEGUN calls in a row.
-- Opening gives the attempts back. While it is open, one trajectory at a time goes out as a probe, and nothing is charged. It is a lease: it
-- holds until `probe_at`, and each probe that fails renews it, for longer; without a scorer it lapses, and the next scorer may probe at once.
-- A probe that is scored closes it.
-- uses: _args, _group, _run

local WINDOW, FIRST = 32, 8
-- Calls in a row of which an environment began nothing before its breaker opens.
local NOTHING_BEGUN = 3
local FIRST_PAUSE_MS, LONGEST_PAUSE_MS = 500, 10000

local function environment_key(run, env)
  return run.base .. 'env:' .. env
end

local function environments_of(run)
  return redis.call('SMEMBERS', run.base .. 'environments')
end

-- `failure_share` and `give_up_ms` of the environment, as the run is configured.
local function setting_of(run, env)
  local packed = redis.call('HGET', run.key, 'environments')
  return packed and cmsgpack.unpack(packed)[env] or {failure_share = 0.5}
end

-- Back-off in ms before try `tries` + 1: doubled each time, less up to a half of it: jitter, drawn from the name.
local function pause_of(who, tries)
  local whole = math.min(FIRST_PAUSE_MS * 2 ^ (tries - 1), LONGEST_PAUSE_MS)
  local jitter = tonumber(string.sub(redis.sha1hex(who .. ' ' .. tries), 1, 4), 16) / 65536
  return math.floor(whole * (1 - jitter / 2))
end

local function is_broken(run, env)
  return redis.call('ZSCORE', run.base .. 'broken', env) ~= false
end

-- Whether anything of the environment waits for a score, or is with a scorer.
local function awaits_score(run, env)
  return redis.call('EXISTS', place_of(run, 'unscored', env), place_of(run, 'alone', env), place_of(run, 'taken', env)) > 0
end

-- The place from which `member` was taken alone, or nil.
local function taken_alone_from(run, env, member)
  local place, who = string.match(redis.call('HGET', environment_key(run, env), 'alone') or '', '^(%a+) (.+)$')
  return who == member and place or nil
end

-- The trajectory waits in line again, for `delay` ms at least; without `place`, in the line that it came from.
local function line_up(run, env, member, delay, place)
  place = place or taken_alone_from(run, env, member) or 'unscored'
  redis.call('ZREM', place_of(run, 'taken', env), member)
  redis.call('ZADD', place_of(run, place, env), run.now + delay, member)
  wake(run, 'scoring')
end

-- The scorer's token is void; the trajectory waits again, at no cost.
local function void_token(run, env, member, delay, place)
  local id, index = split_member(member)
  local key = group_key(run, id)
  local attempts = tonumber(string.match(redis.call('HGET', key, 'w' .. index), '^%d+'))
  redis.call('HSET', key, 'w' .. index, (attempts - 1) .. ' ')
  line_up(run, env, member, delay or 0, place)
end

-- The attempts of what is failing are given back: it was the environment.
local function forgive(run, env)
  for _, member in ipairs(redis.call('ZRANGE', place_of(run, 'failing', env), 0, -1)) do
    local id, index = split_member(member)
    local key = group_key(run, id)
    local token = string.match(redis.call('HGET', key, 'w' .. index) or '', '^%d+ (.*)$')
    if token then redis.call('HSET', key, 'w' .. index, (token == '' and 0 or 1) .. ' ' .. token) end
  end
  redis.call('UNLINK', place_of(run, 'failing', env))
end

-- `kind`: FAILING, or NOT_STARTED where it began nothing. One that breaks again within WINDOW results has been broken since the first time.
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
  redis.call('HDEL', environment_key(run, env), 'results', 'not_started', 'kind', 'message', 'traceback', 'probes', 'probe_at', 'group')
  event(run, 'environment', 'environment', env, 'state', 'works')
  for _, channel in ipairs({'work', 'ready', 'scoring'}) do wake(run, channel) end
end

-- The probe did not bring a score: the breaker stays open, for longer.
local function renew_breaker(run, env, entry)
  local key = environment_key(run, env)
  local probes = redis.call('HINCRBY', key, 'probes', 1)
  redis.call('HSET', key, 'probe_at', run.now + pause_of(env, probes + 1), 'message', words(entry.message),
    'traceback', words(entry.traceback or ''))
end

-- `members` of one environment were scored. Returns how many it had scored before.
local function count_scored(run, env, members)
  local key = environment_key(run, env)
  if is_broken(run, env) then
    local probe = string.match(redis.call('HGET', key, 'alone') or '', ' (.+)$')
    local starts_again = redis.call('HGET', key, 'kind') == 'NOT_STARTED'
    for _, member in ipairs(members) do starts_again = starts_again or member == probe end
    if starts_again then close_breaker(run, env) end
  end
  redis.call('ZREM', place_of(run, 'failing', env), unpack(members))
  redis.call('HINCRBY', key, 'results', #members)
  redis.call('HDEL', key, 'not_started')
  return redis.call('HINCRBY', key, 'scored', #members) - #members
end

-- Whether a trajectory of another group than `id` fails as well, and the environment has scored none since either began to: a prompt that
-- can't be scored explains itself alone.
local function fails_with_others(run, env, id, index)
  local scored = tonumber(redis.call('HGET', environment_key(run, env), 'scored') or 0)
  local function silent_since(of, at)
    local first = redis.call('HGET', group_key(run, of), 'f' .. at)
    return first and tonumber(first) >= scored
  end
  if not silent_since(id, index) then return false end
  for _, member in ipairs(redis.call('ZRANGE', place_of(run, 'failing', env), 0, -1)) do
    local other, at = split_member(member)
    if other ~= id and silent_since(other, at) then return true end
  end
  return false
end

-- The result counts against the environment. Returns whether the breaker has to open for it; `used_up`: else the trajectory fails for good.
local function count_failed(run, env, member, used_up)
  local key, failing = environment_key(run, env), place_of(run, 'failing', env)
  local results = tonumber(redis.call('HGET', key, 'results') or 0)
  if redis.call('ZADD', failing, 'NX', results + 1, member) == 1 then results = redis.call('HINCRBY', key, 'results', 1) end
  redis.call('ZREMRANGEBYSCORE', failing, '-inf', results - WINDOW)
  local seen = math.min(results, WINDOW)
  if used_up and fails_with_others(run, env, split_member(member)) then return true end
  return (seen >= FIRST or used_up) and redis.call('ZCARD', failing) > setting_of(run, env).failure_share * seen
end

-- Whether trajectory `index` has used up its attempts. A failure after which the environment scored others is the trajectory's own: INVALID
-- then ends it at once. Else it may be the environment's, and gets twice the attempts, until the breaker has judged.
local function is_used_up(run, env, group, entry, attempts, scored_before)
  local field = 'f' .. entry.at
  local scored = tonumber(redis.call('HGET', environment_key(run, env), 'scored') or 0)
  redis.call('HSETNX', group.key, field, scored_before or scored)
  if scored <= tonumber(redis.call('HGET', group.key, field)) then return attempts >= 2 * run.max_scoring_attempts end
  return entry.status == 'INVALID' or attempts >= run.max_scoring_attempts
end

-- A result that is no score, of a trajectory that the environment began. `scored_before`: what it had scored before this call, if the call
-- brought scores of it.
local function fail_scoring(run, group, entry, scored_before)
  local env, member = environment_of(run, group), group.id .. ':' .. entry.at
  local alone = taken_alone_from(run, env, member)
  local place = entry.status == 'INTERRUPTED' and 'alone' or nil
  redis.call('HDEL', environment_key(run, env), 'not_started')
  if is_broken(run, env) and redis.call('HGET', environment_key(run, env), 'kind') == 'NOT_STARTED' then close_breaker(run, env) end
  if is_broken(run, env) then
    if alone then renew_breaker(run, env, entry) end
    return void_token(run, env, member, 0, place)
  end
  if entry.status == 'INTERRUPTED' and not alone then return void_token(run, env, member, 0, place) end
  local attempts = tonumber(string.match(redis.call('HGET', group.key, 'w' .. entry.at), '^%d+'))
  local used_up = is_used_up(run, env, group, entry, attempts, scored_before)
  if count_failed(run, env, member, used_up) then
    open_breaker(run, env, 'FAILING', entry)
    return void_token(run, env, member, 0, place)
  end
  local message = entry.status .. ': ' .. words(entry.message)
  if used_up and entry.status == 'INVALID' then return drop(run, group, entry.index, 'scoring refused: ' .. message) end
  if used_up then return drop(run, group, entry.index, 'scoring failed ' .. attempts .. ' times: ' .. message) end
  redis.call('HSET', group.key, 'w' .. entry.at, attempts .. ' ')
  line_up(run, env, member, pause_of(member, attempts), place)
end

-- The environment began none of these entries of a call: {member, entry} each. `begun`: it began others of the call.
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

-- Of `most` trajectories that a scorer has room for: from which place, and how many, may be taken now; and whether to be sent alone.
local function allowance(run, env, most)
  local key, taken = environment_key(run, env), place_of(run, 'taken', env)
  local alone, probe_at = unpack(redis.call('HMGET', key, 'alone', 'probe_at'))
  local broken = is_broken(run, env)
  local function first(place)
    local found = redis.call('ZRANGEBYSCORE', place_of(run, place, env), '-inf', run.now, 'WITHSCORES', 'LIMIT', 0, 1)
    return tonumber(found[2] or math.huge)
  end
  local suspect = first('alone')
  if not broken and suspect == math.huge then
    if not alone then return 'unscored', most end
    if redis.call('ZSCORE', taken, string.match(alone, ' (.+)$')) then return 'unscored', 0 end
    redis.call('HDEL', key, 'alone')
    return 'unscored', most
  end
  if redis.call('EXISTS', taken) == 1 or (broken and run.now < tonumber(probe_at)) then return 'unscored', 0 end
  local suspected = not broken or suspect <= first('unscored')
  return suspected and 'alone' or 'unscored', 1, true
end

-- Whether a group of the environment may be leased: of a broken one only to be its probe, when nothing else of it is there to be sent.
local function may_generate(run, env)
  if not is_broken(run, env) then return true end
  if awaits_score(run, env) then return false end
  local probe = redis.call('HGET', environment_key(run, env), 'group')
  local state = probe and redis.call('HGET', group_key(run, probe), 'state')
  return state ~= 'open' and state ~= 'scoring'
end

-- Void the tokens of up to BATCH trajectories that scorers hold; returns how many are left.
local function void_taken(run)
  local room, left = BATCH, 0
  for _, env in ipairs(environments_of(run)) do
    local members = redis.call('ZRANGE', place_of(run, 'taken', env), 0, room - 1)
    if room <= 0 then members = {} end
    for _, member in ipairs(members) do void_token(run, env, member) end
    room = room - #members
    left = left + redis.call('ZCARD', place_of(run, 'taken', env))
  end
  return left
end
