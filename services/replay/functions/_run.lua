-- The run: what every call reads first, and what it writes last.
--
-- KEYS[1] of every function is the run's hash, `hr:{<run id>}`. All other keys share its hash tag and are derived from it:
-- `hr:{<run id>}:<incarnation>:<name>`, so that a new incarnation (restore) is one write. Under that prefix:
--   g:<id>      hash    a group (see _group.lua)           d:<nonce>  string  a group's record, msgpack
--   p:<nonce>   string  a trajectory's payload, msgpack    s:<nonce>  string  its score, msgpack
--   queue       zset    queued train groups by order       validation zset    queued validation groups by order
--   line        zset    train groups open, scoring, ready, by ticket; O = ZCARD
--   ready       zset    those of `line` that are ready, by ticket
--   drains      string  the replica that gets no more groups until it can have suspects
--   passed      zset    queued train groups that have their place in line, by ticket: those of the other kind behind them were leased
--   leases      zset    open groups by the time the lease ends, or the group's deadline where another replica is to go on with them
--   orphans     zset    open groups whose lease was lost, by ticket: the next leases
--   environments, broken, env:<name>, and the places `unscored:<name>`, `alone:<name>`, `taken:<name>`, `failing:<name>`: see _scoring.lua
--   suspects    zset    open groups whose replica died, by ticket: leased apart from others. They have no deadline, and are not in `leases`
--   Of episodes, `validation`, `passed`, `drains`, `orphans` and `suspects` are keys of their own, `<name>:episodes`.
--   steps       hash    step -> ids of reserved, retained, or kept by a rewind for it (one a line, in ticket order)
--   timelines   list    `<timeline> <version it began at>`: what the weights descend from, oldest first
--   trash       list    groups trained for good whose payloads are still to be freed
--   tally       list    groups trained for good that are still to be metered
--   lane        set     every validation group             unused     set     groups left over at the end
--   failed      zset    dead letters by time, the newest   counts     hash    `<lane>:<state>` -> groups
--   ended       bitmap  orders of train groups that ended failed or filtered; failures: of those that failed
--   letters     hash    order -> id of the dead letters of train groups
--   retries     hash    order -> how often its group was retried     wanted  zset    orders whose prompts the trainer is to supply again
--   since       hash    scored, filtered: train groups since the last batch that got all their scores, and of them were filtered
--   rejected    string  nonce of the newest rejection of a step
--   refusals    hash    code -> calls refused (law 4)      requeues   hash    cause -> groups requeued, passed on
--   replicas    zset    replicas by the time they are due  r:<id>     hash    a replica; h:<id> set of groups it holds
--   runners     zset    runners likewise, each as `runner <id>`, by which name it has its hash and set, and groups name it
--   epoch       hash    the newest membership epoch        members    hash    replica -> what it did in that epoch
--   epochs      set     every epoch of this timeline
-- Of all incarnations: `events` and `metrics` (streams), `m:<moment>` (hashes, see _meter.lua), `clients` (hash: `<what> <client>` -> number of the newest such call, and
-- `taken <client>` -> its answer to the newest take_scoring), `old` (set of incarnations to be swept), `used` (set of timelines and incarnations that have ended, of replicas that
-- have left, and of starts of the replay service that another has followed), channels `wake:<what>`.
-- uses: _args

local LIMITS = {
  'prompts_per_step', 'generations_per_prompt', 'max_age', 'max_attempts', 'max_scoring_attempts',
  'lease_ms', 'group_deadline_ms', 'scoring_deadline_ms', 'replica_dead_ms', 'max_bytes',
  'ahead_steps', 'redundant', 'max_scored', 'retain_steps',
}
-- staleness_policy: ordered, drop or mask; filter: see _filter.lua; build: that opened the run (none: one that did not write it down)
local WORDS = {'staleness_policy', 'filter', 'build'}
-- clock, offset: see `tell_time`; full: see _memory.lua; validation: groups of those before it are dropped, and come no more
local NUMBERS = {
  'next_step', 'committed', 'enqueued', 'closed', 'tickets', 'pinned', 'top', 'evicted', 'freed', 'refill', 'bytes', 'due',
  'clock', 'offset', 'full', 'validation',
}
-- While a library loads there are no iterators.
local FIELDS = {'timeline', 'incarnation'}
for i = 1, #NUMBERS do FIELDS[#FIELDS + 1] = NUMBERS[i] end
for i = 1, #LIMITS do FIELDS[#FIELDS + 1] = LIMITS[i] end
for i = 1, #WORDS do FIELDS[#FIELDS + 1] = WORDS[i] end

local function server_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- A gap between two calls that is longer than this, and than half of what a replica may be silent for, is no time of the run. A shorter one
-- is an ordinary pause: the replay service calls every second.
local LONGEST_GAP_MS = 5000
-- How often the clock is written down.
local TICK_MS = 1000

-- Run time, `run.now`, is the server's clock plus an offset. It stands still while nobody can call (the server was frozen, down, or another one
-- with another clock took over; the clock was set) and while the server is at its limit of memory: nobody's deadline runs out meanwhile.
-- Deadlines are written in run time and never rewritten. `clock` is what the server's clock said when it was last written down.
local function tell_time(run)
  run.read = server_ms()
  local gap = run.read - (run.clock or run.read)
  local longest = math.max(LONGEST_GAP_MS, math.min(run.lease_ms, run.replica_dead_ms) / 2)
  local stands = gap < 0 or gap > longest or (run.full or 0) > 0
  run.offset, run.full = run.offset or 0, run.full or 0
  if stands then run.offset = run.offset - gap end
  run.now = run.read + run.offset
  run.ticks = stands or not run.clock or gap >= TICK_MS
end

-- The clock is written down at the end of this call.
local function tick(run)
  run.ticks = true
end

local function run_key(keys)
  if #keys ~= 1 or not string.find(keys[1], '^hr:{[%w._-]+}$') then
    refuse('HR_INVALID', 'KEYS is not one run key hr:{<run id>}')
  end
  return keys[1]
end

local function load_run(keys)
  local key = run_key(keys)
  local values = redis.call('HMGET', key, unpack(FIELDS))
  if not values[1] then
    refuse('HR_UNAVAILABLE', 'this server holds no run ' .. string.sub(key, 5, -2) .. '; start its replay service')
  end
  local run = {key = key, timeline = values[1], incarnation = values[2]}
  for i = 3, #FIELDS - #WORDS do run[FIELDS[i]] = tonumber(values[i] or nil) end
  for i = #FIELDS - #WORDS + 1, #FIELDS do run[FIELDS[i]] = values[i] end
  if run.build and run.build ~= BUILD then
    refuse('HR_BUILD', 'run ' .. string.sub(key, 5, -2) .. ' was opened by build ' .. run.build .. ', and this call is of build ' .. BUILD ..
      '; restart the service that made it with the version of Headrace that the replay service has')
  end
  run.base = key .. ':' .. run.incarnation .. ':'
  tell_time(run)
  run.deltas, run.waking, run.first_due, run.first_ticket = {}, {}, run.due, run.tickets
  return run
end

-- `count` groups of `lane` leave state `from` (nil: are new) for state `to` (nil: are forgotten).
local function move(run, lane, from, to, count)
  local deltas = run.deltas
  if from then deltas[lane .. ':' .. from] = (deltas[lane .. ':' .. from] or 0) - (count or 1) end
  if to then deltas[lane .. ':' .. to] = (deltas[lane .. ':' .. to] or 0) + (count or 1) end
end

-- Those who wait on `channel` (work, ready, scoring, epoch) are told once, at the end of the call.
local function wake(run, channel)
  run.waking[channel] = true
end

-- Something falls due at `time`: the first call after it looks (see _due.lua).
local function due_at(run, time)
  if time < run.due then run.due = time end
end

-- A number that no earlier call was given: a place in line, and what makes a token another one each time (law 4), even if the call that
-- asks for it is delivered twice, however late, under the same nonce.
local function take_ticket(run)
  run.tickets = run.tickets + 1
  return run.tickets - 1
end

local function set(run, field, value)
  run[field] = value
  redis.call('HSET', run.key, field, value)
end

-- Whether the trainer has told `what` of `step`, or of a later one, on this timeline; if not, it has now.
local function told_before(run, what, step)
  local timeline, last = string.match(redis.call('HGET', run.key, what) or '', '^(%S+) (%d+)$')
  if timeline == run.timeline and tonumber(last) >= step then return true end
  redis.call('HSET', run.key, what, run.timeline .. ' ' .. step)
  return false
end

-- Calls of `what` that name their client and a number, higher than that of any before: whether this client has made this call, or a later one,
-- before; if not, it has now. What arrives late may come from before a restore.
local function made_before(run, what, call)
  local key, field = run.key .. ':clients', what .. ' ' .. call.client
  if call.number <= tonumber(redis.call('HGET', key, field) or 0) then return true end
  redis.call('HSET', key, field, call.number)
  return false
end

-- What happened, for people. Capped: history is the ledger's.
local function event(run, kind, ...)
  redis.call('XADD', run.key .. ':events', 'MAXLEN', '~', 10000, '*', 'kind', kind, ...)
end

local function count_refusal(run, code)
  redis.call('HINCRBY', run.base .. 'refusals', code, 1)
end

local function flush(run)
  for field, delta in pairs(run.deltas) do
    if delta ~= 0 then redis.call('HINCRBY', run.base .. 'counts', field, delta) end
  end
  if run.bytes_delta and run.bytes_delta ~= 0 then redis.call('HINCRBY', run.key, 'bytes', run.bytes_delta) end
  if run.ticks then redis.call('HSET', run.key, 'clock', run.read, 'offset', run.offset) end
  if run.due ~= run.first_due then redis.call('HSET', run.key, 'due', run.due) end
  if run.tickets ~= run.first_ticket then redis.call('HSET', run.key, 'tickets', run.tickets) end
  for channel in pairs(run.waking) do redis.call('PUBLISH', run.key .. ':wake:' .. channel, '1') end
end

-- Law 4 for calls of the trainer and of replicas: another timeline or incarnation is refused.
local function require_timeline(run, timeline)
  if run.timeline ~= timeline then
    refuse('HR_TIMELINE', 'timeline ' .. show(timeline) .. ' has ended; a rewind or restore started another')
  end
end

local function require_incarnation(run, incarnation)
  if run.incarnation ~= incarnation then
    refuse('HR_TIMELINE', 'incarnation ' .. show(incarnation) .. ' has ended; a restore installed another')
  end
end
