-- Episodes: trajectories that a program writes with several calls to the policy. Each call is appended under the lease (append.lua), and
-- the whole record is handed in at the end (finish.lua). An episode that is unfinished when its lease ends starts over.
--
-- An episode may be begun several times under one lease. `tries`, how often it was begun before, distinguishes calls for the current try
-- from calls for an earlier one (law 4): at most one program works on an episode.
--
-- Its lease may outlive a rewind, and any replica may have sampled for it. So `append` names the timeline of the weights that wrote the
-- call, and is refused if the run's weights don't descend from them (law 2). `finish` brings calls that were appended.
-- uses: _args, _group, _payload, _run, _trajectory

-- The group of a call that names an episode, or nil, code and message. With it three counts of the episode: how often it was begun before,
-- how many of its attempts it has used, and how often it was interrupted since it last ended in another way.
local function episode_of(run, call, entry)
  local group = load_group(run, entry.id)
  if not group then return nil, lease_refusal(run, call, entry) end
  local fields = redis.call('HMGET', group.key, 'p' .. entry.at, 'x' .. entry.at, 'a' .. entry.at, 'leased', 'q' .. entry.at)
  group.tries, group.failed, group.interrupted = tries_of(fields[3] or nil)
  group.leased = tonumber(fields[4] or nil)
  group.appended = select(4, extent_of(fields[5]))
  group.has_ended = fields[1] ~= false or fields[2] ~= false
  return group
end

-- Why the episode can't continue with this call: code and message, or nil.
local function episode_refusal(run, call, entry, group)
  local code, message = lease_refusal(run, call, entry, group)
  if not code then code, message = record_refusal(run, entry, group) end
  if code then return code, message end
  local what = 'episode ' .. entry.at .. ' of group ' .. entry.id
  if call.tries < group.tries then return 'HR_LEASE_LOST', what .. ' has started over' end
  if call.tries > group.tries then  -- the server lost writes, and with them the earlier tries
    return 'HR_LEASE_LOST', what .. ' was begun ' .. group.tries .. ' times before, as far as is known, not ' .. call.tries
  end
end

local function weights_refusal(run, call, entry)
  if descends(run, call.timeline, entry.newest) then return end
  return 'HR_INVALID', 'a rewind has ended timeline ' .. show(call.timeline) .. ', whose version ' .. entry.newest .. ' wrote of group ' ..
    entry.id
end

local function bytes_refusal(run, entry, bytes)
  local most = run.max_episode_bytes
  if bytes <= most then return end
  return 'HR_EPISODE_BYTES', 'episode ' .. entry.at .. ' of group ' .. entry.id .. ' has ' .. bytes ..
    ' bytes, more than max_episode_bytes ' .. most
end
