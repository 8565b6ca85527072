-- enqueue: add groups to the queue of their lane. Groups that were taken before change nothing (law 1: no prompt twice).
-- KEYS     the run
-- ARGV     timeline, incarnation, refill (take orders at or below the watermark that the run wants), validation (version that the
--          validation groups evaluate), groups: of each id, lane, order, env, n, worst (bytes that n trajectories may grow to), nonce; then
--          for each its record (msgpack; kept at d:<nonce>)
-- Returns  how many were new. A train group is new if its order is beyond the watermark `enqueued` (with `refill`: or is wanted for a
--          retry; any order while the run wants a refill) and not in `ended`, and its id is unknown. A validation group is new if its id is
--          unknown and its validation was not dropped. A group has episodes if its environment does; that doesn't change when the run is
--          opened again. Validators lease the others of a validation that has some (drop_validation.lua).
-- Errors   HR_TIMELINE, HR_STEP (the train groups skip some after `enqueued`), HR_INVALID (malformed; new train groups after close, except
--          those that are wanted; refill while steps are being freed)
-- uses: _args, _group, _register, _run, _scoring

local MOST_TRAJECTORIES = 1024
-- bits of the bitmap `ended`
local MOST_ORDERS = 2 ^ 32

local LANE = one_of({'train', 'validation'})

local function parse(run, given, validation, record)
  local group = {
    validation = validation,
    id = name(given.id, 'id'), lane = LANE(given.lane, 'lane'), order = natural(given.order, 'order'), env = name(given.env, 'env'),
    n = positive(given.n, 'n'), worst = natural(given.worst, 'worst'), nonce = name(given.nonce, 'nonce'), record = record,
  }
  -- tokens and members are built from the id
  if #group.id > 200 then refuse('HR_INVALID', 'group id ' .. show(group.id) .. ' is longer than 200') end
  if group.n > MOST_TRAJECTORIES then
    refuse('HR_INVALID', 'n is ' .. group.n .. '; a group has at most ' .. MOST_TRAJECTORIES .. ' trajectories')
  end
  if group.order >= MOST_ORDERS then
    refuse('HR_INVALID', 'order ' .. group.order .. ' of group ' .. group.id .. '; a run has at most 2^32 prompts')
  end
  group.key = group_key(run, group.id)
  return group
end

local function is_new(run, group, refill, seen)
  if seen[group.id] or redis.call('EXISTS', group.key) == 1 then return false end
  if group.lane == 'validation' then return group.validation >= (run.validation or 0) end
  return (refill or group.wanted or group.order > run.enqueued) and redis.call('GETBIT', run.base .. 'ended', group.order) == 0
end

local function check_new(run, group)
  if group.lane == 'train' and run.closed == 1 and not group.wanted then
    refuse('HR_INVALID', 'group ' .. group.id .. ' arrived after the queue was closed')
  end
end

local function add_group(run, group)
  redis.call('SET', run.base .. 'd:' .. group.nonce, group.record)
  redis.call('HSET', group.key, 'state', 'queued', 'lane', group.lane, 'order', group.order, 'env', group.env, 'n', group.n,
    'record', group.nonce, 'worst', group.worst, 'attempt', 0, 'failures', 0, 'token', '', 'held', 0, 'pushed', 0,
    'scored', 0, 'actual', 0)
  if group.kind then redis.call('HSET', group.key, 'kind', group.kind) end
  redis.call('ZADD', queue_of(run, group.lane, group.kind), group.order, group.id)
  if group.lane == 'validation' then
    redis.call('HSET', group.key, 'validation', group.validation)
    redis.call('SADD', run.base .. 'lane', group.id)
  end
  if group.wanted then redis.call('ZREM', run.base .. 'wanted', group.order) end
  move(run, group.lane, nil, 'queued')
  tell(run, 'enqueued', group.id, {'l', group.lane, 'o', group.order, 'e', group.env, 'n', group.n})
end

-- Law 1: a feeder continues where it left off. If the run has not reached that point, the server lost the groups in between.
local function require_no_gap(run, groups)
  local first = math.huge
  for _, group in ipairs(groups) do
    if group.lane == 'train' and group.order > run.enqueued then first = math.min(first, group.order) end
  end
  if first ~= math.huge and first > run.enqueued + 1 then
    refuse('HR_STEP', 'enqueue of order ' .. first .. '; the next one is ' .. run.enqueued + 1 .. ': the buffer lost writes')
  end
end

register('enqueue', {
  timeline = text, incarnation = text, refill = flag, validation = natural, groups = list_of(map, BATCH),
}, function(run, call, args)
  require_bytes(#call.groups, args)
  require_timeline(run, call.timeline)
  require_incarnation(run, call.incarnation)
  -- a refill that arrives late, after `refilled`, adds nothing: its groups may have been trained and freed since (law 1)
  local refill = call.refill and run.refill == 1
  -- their groups are still known, but won't be soon
  if refill and redis.call('EXISTS', run.base .. 'trash') == 1 then
    refuse('HR_INVALID', 'refill while trained steps are still being freed; repeat commit until nothing is left')
  end
  local new, seen = {}, {}
  for i, given in ipairs(call.groups) do
    local group = parse(run, given, call.validation, args[i + 1])
    group.wanted = call.refill and group.lane == 'train' and redis.call('ZSCORE', run.base .. 'wanted', group.order)
    if is_new(run, group, refill, seen) then new[#new + 1] = group end
    seen[group.id] = true
  end
  require_no_gap(run, new)
  for _, group in ipairs(new) do check_new(run, group) end
  local enqueued, environments = run.enqueued, {}
  local has_validators = redis.call('EXISTS', run.base .. 'validators') == 1
  for _, group in ipairs(new) do
    if not environments[group.env] then
      redis.call('SADD', run.base .. 'environments', group.env)
      environments[group.env] = {kind = setting_of(run, group.env).episodes and 'episodes' or nil}
    end
    group.kind = environments[group.env].kind or group.lane == 'validation' and has_validators and 'validators' or nil
    add_group(run, group)
    if group.lane == 'train' then enqueued = math.max(enqueued, group.order) end
  end
  if enqueued ~= run.enqueued then set(run, 'enqueued', enqueued) end
  if #new > 0 then wake(run, 'work') end
  return #new
end, true, true)
