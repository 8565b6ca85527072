-- Membership epochs of the weight channel: announced -> transfer -> done or aborted; `verify` is the only way to HEALTHY.
--
-- epoch    hash: id, version, timeline, state, rendezvous (msgpack), reference (msgpack: the trainer's log-probabilities of the probe, and
--          the tolerances; members never see them)
-- members  hash: replica -> asked | acknowledged | verified | refused <why> | interrupted <why> (not its fault) | left out
--
-- An epoch asks only replicas that need its weights: those that hold them, verified, go on with their leases, and so do those that
-- validate older ones (_fleet.lua). From `transfer` on, every other replica is STALE until it verifies: its weights are a mixture of
-- versions, or not the newest.
-- uses: _args, _fleet, _run

-- The number of bytes of the length, or of the value, after each msgpack type from 0xc0 to 0xdf. Types without an entry occur in no
-- message. (cmsgpack can't read the bytes that a rendezvous contains.)
local VALUE_BYTES = {
  [192] = 0, [194] = 0, [195] = 0, [202] = 4, [203] = 8, [204] = 1, [205] = 2, [206] = 4, [207] = 8, [208] = 1, [209] = 2, [210] = 4,
  [211] = 8,
}
local LENGTH_BYTES = {[196] = 1, [197] = 2, [198] = 4, [217] = 1, [218] = 2, [219] = 4, [220] = 2, [221] = 4, [222] = 2, [223] = 4}

-- Whether `data` is a single msgpack map.
local function is_packed_map(data)
  local first = string.byte(data) or 0
  if not (first >= 128 and first <= 143 or first == 222 or first == 223) then return false end
  local at, left = 1, 1  -- where the next value begins, and how many values are left
  while left > 0 do
    local kind = string.byte(data, at) or 193  -- not a valid type
    local behind, skip = LENGTH_BYTES[kind] or 0, VALUE_BYTES[kind] or 0
    if kind >= 192 and kind <= 223 and behind == 0 and not VALUE_BYTES[kind] or at + behind > #data then return false end
    local length = 0
    for i = at + 1, at + behind do length = length * 256 + string.byte(data, i) end
    at, left = at + 1 + behind, left - 1
    if kind >= 128 and kind <= 143 then left = left + 2 * (kind - 128)
    elseif kind >= 144 and kind <= 159 then left = left + kind - 144
    elseif kind == 220 or kind == 221 then left = left + length
    elseif kind == 222 or kind == 223 then left = left + 2 * length
    elseif kind >= 160 and kind <= 191 then skip = kind - 160
    elseif behind > 0 then skip = length
    end
    -- each value takes at least one byte
    if at + skip + left > #data + 1 then return false end
    local is_text = kind >= 160 and kind <= 191 or kind >= 217 and kind <= 219
    if is_text and not is_utf_8(string.sub(data, at, at + skip - 1)) then return false end
    at = at + skip
  end
  return at == #data + 1
end

-- The rendezvous of a call, which every replica reads.
local function require_rendezvous(args)
  require_bytes(1, args)
  if not is_packed_map(args[2]) then refuse('HR_INVALID', 'the rendezvous ' .. show(args[2]) .. ' is not a msgpack map') end
  return args[2]
end

local function load_epoch(run)
  local values = redis.call('HMGET', run.base .. 'epoch', 'id', 'version', 'timeline', 'state', 'rendezvous')
  if not values[1] then return nil end
  return {id = values[1], version = tonumber(values[2]), timeline = values[3], state = values[4], rendezvous = values[5]}
end

local function reply_epoch(run, epoch)
  local members = redis.call('HGETALL', run.base .. 'members')
  local fields = {id = epoch.id, version = epoch.version, timeline = epoch.timeline, state = epoch.state, members = members}
  return {cmsgpack.pack(fields), epoch.rendezvous}
end

local function set_state(run, epoch, state)
  epoch.state = state
  redis.call('HSET', run.base .. 'epoch', 'state', state)
  event(run, 'epoch', 'epoch', epoch.id, 'version', epoch.version, 'state', state)
  wake(run, 'work')
end

local function set_stale(run, id, reason)
  if redis.call('HGET', replica_key(run, id), 'state') == 'HEALTHY' then
    redis.call('HSET', replica_key(run, id), 'state', 'STALE', 'reason', words(reason))
    event(run, 'replica', 'replica', id, 'state', 'STALE', 'reason', words(reason))
    wake(run, 'work')  -- its share is for others
  end
end

-- Whether the replica holds the epoch's weights, verified. Another epoch of that version, for replicas that joined late, is not its own.
local function holds(run, id, epoch)
  local state, version, timeline = unpack(redis.call('HMGET', replica_key(run, id), 'state', 'version', 'timeline'))
  return state == 'HEALTHY' and tonumber(version) == epoch.version and timeline == epoch.timeline
end

-- Whether the epoch leaves the replica as it is: it holds these weights, pulls its own, or validates others.
local function keeps(run, id, epoch)
  return holds(run, id, epoch) or pulls_weights(run, id) or validates(run, id)
end

-- The epoch if it is the newest, of this timeline, and in one of `states`; otherwise the call is refused.
local function require_epoch(run, id, states)
  local epoch = load_epoch(run)
  if not epoch or epoch.id ~= id then refuse('HR_FENCED', 'epoch ' .. show(id) .. ' is not the newest') end
  if epoch.timeline ~= run.timeline then refuse('HR_TIMELINE', 'a rewind has ended the timeline of epoch ' .. id) end
  if not states[epoch.state] then refuse('HR_FENCED', 'epoch ' .. id .. ' is ' .. epoch.state) end
  return epoch
end

local function require_member(run, replica, wanted)
  local state = redis.call('HGET', replica_key(run, replica), 'state')
  if not takes_part(state) then
    refuse('HR_FENCED', 'replica ' .. replica .. ' is ' .. (state or 'DEAD') .. '; it must register again')
  end
  local did = redis.call('HGET', run.base .. 'members', replica)
  if not did or not wanted[did] then
    refuse('HR_FENCED', 'replica ' .. replica .. ' is not a member of the epoch that may do this (' .. tostring(did) .. ')')
  end
  return did
end
