-- Trajectories as they are handed in: finished (push, finish), or unfinished and to be continued (save).
--
-- A call of `push` or `save` brings up to BATCH of them in columns, lists with an entry for each: group (its id), index, token (of the
-- lease), nonce, bytes (of the payload), length (in tokens), oldest and newest (weight versions). Each trajectory's bytes argument is its
-- payload, or '' if that is staged at p:<nonce> with a time to live. (One map per trajectory took the server a tenth longer.)
-- uses: _args, _group, _trajectory

local PAYLOADS = {
  timeline = text, incarnation = name, group = list_of(name, BATCH), index = list_of(natural, BATCH), token = list_of(text, BATCH),
  nonce = list_of(name, BATCH), bytes = list_of(natural, BATCH), length = list_of(positive, BATCH), oldest = list_of(natural, BATCH),
  newest = list_of(natural, BATCH),
}
local COLUMNS = {'group', 'index', 'token', 'nonce', 'bytes', 'length', 'oldest', 'newest'}

-- The entries of a call. Lua formats numbers slowly, so `at` is the index as text, which becomes part of many names, and `extent` is
-- length, oldest and newest version as they are stored.
local function parse_payloads(run, call, args)
  for _, column in ipairs(COLUMNS) do
    if #call[column] ~= #args - 1 then
      refuse('HR_INVALID', #args - 1 .. ' payloads, and ' .. #call[column] .. ' entries of ' .. column)
    end
  end
  local all, prefix = {}, staged_key(run, call.incarnation, '')
  for i = 1, #args - 1 do
    local id, index, payload = call.group[i], call.index[i], args[i + 1]
    local length, oldest, newest = call.length[i], call.oldest[i], call.newest[i]
    if payload ~= '' and #payload ~= call.bytes[i] then
      refuse('HR_INVALID', 'the payload of trajectory ' .. id .. ':' .. index .. ' has ' .. #payload .. ' bytes, not ' .. call.bytes[i])
    end
    all[i] = {
      id = id, index = index, at = string.format('%d', index), token = call.token[i], nonce = call.nonce[i], bytes = call.bytes[i],
      extent = string.format('%d %d %d', length, oldest, newest), length = length, oldest = oldest, newest = newest, payload = payload,
      key = prefix .. call.nonce[i], place = i,
    }
  end
  return all
end

-- Whether a rewind or restore has ended the timeline or incarnation of the call.
local function is_foreign(run, call)
  return run.timeline ~= call.timeline or run.incarnation ~= call.incarnation
end

-- Why the trajectory is refused regardless of its index: code and message, or nil. Law 4: the token is the fence. A lease may outlive its
-- timeline (rewind.lua).
local function lease_refusal(run, call, entry, group)
  if is_foreign(run, call) and not (group and group.token == entry.token) then
    return 'HR_TIMELINE', 'a rewind or restore has ended the timeline of group ' .. entry.id
  end
  if group and group.token == entry.token and group.state ~= 'open' then
    return 'HR_SURPLUS', 'group ' .. entry.id .. ' has its ' .. group.n .. ' trajectories without this one'
  end
  if not group or group.token ~= entry.token or entry.token == '' then
    return 'HR_LEASE_LOST', 'the lease of group ' .. entry.id .. ' is over'
  end
  if lease_over(run, entry.id) then
    return 'HR_LEASE_LOST', 'the lease of group ' .. entry.id .. ' has expired'
  end
end

local function record_refusal(run, entry, group)
  if entry.index >= group.count then
    return 'HR_INVALID', 'index ' .. entry.index .. ' of group ' .. entry.id .. ', which has ' .. group.count .. ' trajectories'
  end
  if entry.oldest > entry.newest or entry.newest > run.next_step then
    return 'HR_INVALID', 'versions ' .. entry.oldest .. ' to ' .. entry.newest .. ' of group ' .. entry.id .. '; the newest weights are ' ..
      run.next_step
  end
end

-- Add the trajectory to the group. Returns its `p<i>`, to be written with the group's sums.
local function take_in(run, group, entry)
  forget_prefix(run, group, entry.index)
  group.pushed, group.actual = group.pushed + 1, group.actual + entry.bytes
  group.oldest = math.min(group.oldest or entry.oldest, entry.oldest)
  group.newest = math.max(group.newest or entry.newest, entry.newest)
  return pushed_value(entry.nonce, entry.extent, math.max(0, run.now - group.leased))
end

-- Make the payload permanent; or return code and message.
local function keep_payload(entry)
  if entry.payload ~= '' then
    if not redis.call('SET', entry.key, entry.payload, 'NX') then
      return 'HR_INVALID', 'the nonce ' .. entry.nonce .. ' of group ' .. entry.id .. ' is another payload\'s'
    end
  elseif redis.call('PERSIST', entry.key) == 0 then
    return 'HR_UNSTAGED', 'the payload of group ' .. entry.id .. ' was not staged, its time ran out, or the server lost it'
  end
end

-- Delete staged payloads. A payload that a call has made permanent stays, whether an earlier delivery of the same call or another call did
-- it.
local function unstage(entry)
  if entry.payload == '' and redis.call('PTTL', entry.key) >= 0 then redis.call('UNLINK', entry.key) end
end
