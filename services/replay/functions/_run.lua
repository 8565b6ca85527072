-- The run: the hash that every call reads first and writes last.
--
-- KEYS[1] of every function is the run's hash, `hr:{<run id>}`. All other keys share its hash tag and are derived from it:
-- `hr:{<run id>}:<incarnation>:<name>`, so that a new incarnation (restore) is one write. Under that prefix:
--   g:<id>      hash    a group (see _group.lua)           d:<nonce>  string  a group's record, msgpack
--   p:<nonce>   string  a trajectory's payload, msgpack    s:<nonce>  string  its score, msgpack
--   queue       zset    queued train groups by order       validation zset    queued validation groups by order
--   line        zset    train groups open, scoring, ready, by ticket; O = ZCARD
--   ready       zset    those of `line` that are ready, by ticket
--   drains      string  the replica that gets no more groups until it can take suspects
--   passed      zset    queued train groups that have their place in line because groups of the other kind behind them were leased, by
--                       ticket
--   leases      zset    open groups that are leased, by the end of their lease
--   orphans     zset    open groups whose lease was lost, by ticket: leased next. No deadline runs for them
--   environments, broken, env:<name>, and the places `unscored:<name>`, `alone:<name>`, `taken:<name>`, `failing:<name>`: see _scoring.lua
--   suspects    zset    open groups whose replica died or was silent, by ticket: leased apart from others. No deadline runs for them
--   For episodes, `validation`, `passed`, `drains`, `orphans` and `suspects` are separate keys, `<name>:episodes`; and for groups that
--   validators lease, `<name>:validators`.
--   validators  set     replicas that validate beside training, until no group of the validation is left to evaluate (_fleet.lua)
--   steps       hash    step -> ids of groups reserved for it, retained, or kept for it by a rewind (one per line, in ticket order)
--   timelines   list    `<timeline> <version at which it began>`: the ancestry of the weights, oldest first
--   trash       list    groups trained for good whose payloads are not freed yet
--   tally       list    groups trained for good that are not metered yet
--   lane        set     every validation group             unused     set     groups left over at the end
--   failed      zset    dead letters by time, the newest   counts     hash    `<lane>:<state>` -> groups
--   ended       bitmap  orders of train groups that ended as failed or filtered; failures: only those that failed
--   letters     hash    order -> id of the dead letters of train groups
--   retries     hash    order -> how often its group was retried     wanted  zset    orders whose prompts the trainer is to supply again
--   since       hash    scored, filtered: train groups that got all their scores since the last batch, and how many of them were filtered
--   rejected    string  nonce of the newest rejection of a step
--   refusals    hash    code -> calls refused (law 4)      requeues   hash    cause -> groups requeued, passed on
--   replicas    zset    replicas by the time they are due  r:<id>     hash    a replica; h:<id> set of groups it holds
--   waiting     set     replicas that got less than they asked for at their newest lease
--   runners     zset    runners likewise, each as `runner <id>`; its hash, its set and its groups use that name
--   epoch       hash    the newest membership epoch        members    hash    replica -> what it did in that epoch
--   epochs      set     every epoch of this timeline
--   offer       hash    the newest version that replicas may pull     offers  hash    id -> what proves it (see _offers.lua)
-- Shared by all incarnations:
--   events, metrics   streams
--   history           stream: what happened to every group, until the trainer has written it to the run's folder (see `tell`)
--   m:<moment>        hashes (see _meter.lua)
--   clients           hash: `<what> <client>` -> number of the newest such call; `taken <client>` -> the answer to its newest take_scoring
--   old               set of incarnations to be swept
--   used              set of timelines and incarnations that have ended, replicas that have left, and superseded starts of the replay
--                     service
--   wake:<what>       channels
-- uses: _args

-- The fields that every call reads: words first, then numbers.
-- build: the one that opened the run (absent: an old one that did not record it); clock, offset: see `tell_time`; full: see _memory.lua;
-- validation: groups of validations before this version are dropped, and can't be added again; short: 1 if a group was not leased since
-- `max_bytes` had no room for it, until some becomes free
local WORDS = {'timeline', 'incarnation', 'build', 'staleness_policy', 'filter'}
local NUMBERS = {
  'next_step', 'committed', 'enqueued', 'closed', 'tickets', 'pinned', 'top', 'evicted', 'freed', 'refill', 'bytes', 'due',
  'clock', 'offset', 'full', 'validation', 'short',
}
local FIELDS = {}
-- While a library loads there are no iterators.
for i = 1, #WORDS do FIELDS[i] = WORDS[i] end
for i = 1, #NUMBERS do FIELDS[#FIELDS + 1] = NUMBERS[i] end

-- The limits that `open_run` sets, by name, with their parsers. `grep -E "^limit|^LIMITS" *.lua` lists them.
local LIMITS = {}

-- Declare a limit that is a number, `run.<name>` in every call. The file that enforces it does this; those of several files are below.
local function limit(name_of, parse)
  LIMITS[name_of], FIELDS[#FIELDS + 1] = parse, name_of
end

limit('prompts_per_step', positive)
limit('max_age', natural)
limit('lease_ms', positive)
limit('replica_dead_ms', positive)
LIMITS.staleness_policy = one_of({'ordered', 'drop', 'mask'})
LIMITS.generations_per_prompt = positive  -- for people: a group says how many it has

local function server_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- A gap between two calls does not count as time of the run if it is longer than this, and longer than half the time for which a replica
-- may be silent. A shorter gap is an ordinary pause: the replay service calls every second.
local LONGEST_GAP_MS = 5000
-- how often the clock is recorded
local TICK_MS = 1000

-- Run time, `run.now`, is the server's clock plus an offset. It stands still while nobody can call (the server was frozen or down, another
-- one with a different clock took over, the clock was set) and while the server is at its memory limit, so that no deadline expires
-- meanwhile. Deadlines are written in run time and never rewritten. `clock` is the server's clock when it was last recorded.
local function tell_time(run)
  run.read = server_ms()
  local gap = run.read - (run.clock or run.read)
  local longest = math.max(LONGEST_GAP_MS, math.min(run.lease_ms, run.replica_dead_ms) / 2)
  local stands = gap < 0 or gap > longest or (run.full or 0) > 0
  run.offset, run.full = run.offset or 0, run.full or 0
  if stands then run.offset = run.offset - gap end
  run.now = run.read + run.offset
  run.ticks = stands or not run.clock or gap >= TICK_MS  -- the clock is recorded at the end of this call
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
  local run = {key = key}
  for i = 1, #WORDS do run[FIELDS[i]] = values[i] end
  for i = #WORDS + 1, #FIELDS do run[FIELDS[i]] = tonumber(values[i] or nil) end
  if run.build and run.build ~= BUILD then
    refuse('HR_BUILD', 'run ' .. string.sub(key, 5, -2) .. ' was opened by build ' .. run.build .. ', and this call is of build ' ..
      BUILD .. '; restart the service that made it with the version of Headrace that the replay service has')
  end
  run.base = key .. ':' .. run.incarnation .. ':'
  -- how far behind the next step weights may be for work to begin under them
  run.reach = run.staleness_policy == 'ordered' and run.max_age or run.ahead_steps
  tell_time(run)
  run.deltas, run.waking, run.first_due, run.first_ticket = {}, {}, run.due, run.tickets
  return run
end

-- `count` groups of `lane` move from state `from` (nil: they are new) to state `to` (nil: they are deleted).
local function move(run, lane, from, to, count)
  local deltas = run.deltas
  if from then deltas[lane .. ':' .. from] = (deltas[lane .. ':' .. from] or 0) - (count or 1) end
  if to then deltas[lane .. ':' .. to] = (deltas[lane .. ':' .. to] or 0) + (count or 1) end
end

-- Notify those who wait on `channel` (work, ready, scoring, epoch), once, at the end of the call.
local function wake(run, channel)
  run.waking[channel] = true
end

-- Something falls due at `time`. The first call after that handles it (see _due.lua).
local function due_at(run, time)
  if time < run.due then run.due = time end
end

-- Whether work may begin under weights of this version: what they write now can still be trained (law 2).
local function may_work_under(run, version) return version + run.reach >= run.next_step end

-- A number that no earlier call got: a place in line, or the part that makes each token unique (law 4), even if the call that asks for it
-- is delivered twice, however late, under the same nonce.
local function take_ticket(run)
  run.tickets = run.tickets + 1
  return run.tickets - 1
end

local function set(run, field, value)
  run[field] = value
  redis.call('HSET', run.key, field, value)
end

-- Whether the trainer has already reported `what` of `step`, or of a later step, on this timeline. If not, record that it has now.
local function told_before(run, what, step)
  local timeline, last = string.match(redis.call('HGET', run.key, what) or '', '^(%S+) (%d+)$')
  if timeline == run.timeline and tonumber(last) >= step then return true end
  redis.call('HSET', run.key, what, run.timeline .. ' ' .. step)
  return false
end

-- For calls of `what` that name their client and a number, higher than that of any call before: whether this client has already made this
-- call or a later one. If not, record that it has now. A call that arrives late may come from before a restore.
local function made_before(run, what, call)
  local key, field = run.key .. ':clients', what .. ' ' .. call.client
  if call.number <= tonumber(redis.call('HGET', key, field) or 0) then return true end
  redis.call('HSET', key, field, call.number)
  return false
end

-- Append an event, for people. The stream is capped: `history` is what says what became of every group.
local function event(run, kind, ...)
  redis.call('XADD', run.key .. ':events', 'MAXLEN', '~', 10000, '*', 'kind', kind, ...)
end

-- The most entries of `history`. Beyond it the oldest are cut off, and counted in `history_lost`: nobody has read them.
local HISTORY = 100000
-- bytes of a reason in it
local REASON = 300

-- Append to `history` that `what` happened to these groups (`ids`, one per line; '': to the run), for a `reason` if any. The trainer writes
-- the entries to the run's folder, and then clears them (drained.lua). Every change of a group's state is told, in the call that makes it.
-- Fields have one letter, because there are tens of entries for each group:
--   w  what           g  groups                 l, o, e, n  lane, order, environment and trajectories of a group that was enqueued
--   r  replica        a  attempt                p  trajectories, by commas: `<index> <length> <oldest> <newest>` or `<index> <reward>`
--   i  index          s  step                   v, t  weight version, timeline
--   b  build          c  cause of a requeue     m  reason
local function tell(run, what, ids, fields, reason)
  fields = fields or {}
  if reason then fields[#fields + 1], fields[#fields + 2] = 'm', words(reason, REASON) end
  redis.call('XADD', run.key .. ':history', '*', 'w', what, 'g', ids, unpack(fields))
  run.told = true
end

local function cut_history(run)
  local key = run.key .. ':history'
  if redis.call('XLEN', key) <= HISTORY then return end
  local lost = redis.call('XTRIM', key, 'MAXLEN', '~', HISTORY)
  if lost > 0 then redis.call('HINCRBY', run.key, 'history_lost', lost) end
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
  if run.told then cut_history(run) end
  for channel in pairs(run.waking) do redis.call('PUBLISH', run.key .. ':wake:' .. channel, '1') end
end

-- Law 4 for calls of the trainer and of replicas: refuse another timeline or incarnation.
local function require_timeline(run, timeline)
  if run.timeline ~= timeline then
    refuse('HR_TIMELINE', 'timeline ' .. show(timeline) .. ' has ended; a rewind or restore started another')
  end
end

-- Whether the run's weights descend from those of `version` on `timeline` (law 2).
local function descends(run, timeline, version)
  if timeline == run.timeline then return true end
  local found
  for _, entry in ipairs(redis.call('LRANGE', run.base .. 'timelines', 0, -1)) do
    local ancestor, start = string.match(entry, '^(%S+) (%d+)$')
    if found then return version <= tonumber(start) end  -- where the next one went on
    found = ancestor == timeline
  end
  return false
end

local function require_incarnation(run, incarnation)
  if run.incarnation ~= incarnation then
    refuse('HR_TIMELINE', 'incarnation ' .. show(incarnation) .. ' has ended; a restore installed another')
  end
end
