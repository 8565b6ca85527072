-- renew_scoring: restart the deadline of trajectories on which a scorer still works.
-- KEYS     the run
-- ARGV     client (the scorer), number (of this client's call, higher than any before), and columns with an entry for each trajectory, up
--          to BATCH: groups (ids), indices, tokens
-- Returns  the places in these columns, from 0, of trajectories that are no longer with this scorer
-- Errors   HR_INVALID
--
-- A call that arrives again, or late, renews nothing.
-- uses: _args, _group, _register, _run, _trajectory

register('renew_scoring', {
  client = name, number = positive, groups = list_of(name, BATCH), indices = list_of(natural, BATCH), tokens = list_of(name, BATCH),
}, function(run, call)
  if #call.groups ~= #call.indices or #call.groups ~= #call.tokens then refuse('HR_INVALID', 'columns of unequal length') end
  local late = made_before(run, 'renew', call)
  local deadline, lost = run.now + run.scoring_deadline_ms, {}
  for i, id in ipairs(call.groups) do
    local index = string.format('%d', call.indices[i])
    local group = load_group(run, id, {'state', 'env'})
    local _, token = scoring_of(group and redis.call('HGET', group.key, 'w' .. index))
    -- XX, because a trajectory that has been scored still has its token
    local taken = token == call.tokens[i] and place_of(run, 'taken', group.env)
    local ends = taken and tonumber(redis.call('ZSCORE', taken, id .. ':' .. index) or nil)
    if not (ends and ends > run.now) then
      lost[#lost + 1] = i - 1
    elseif not late then
      redis.call('ZADD', taken, deadline, id .. ':' .. index)
      due_at(run, deadline)  -- it may be before all that is due, as in `lease_end`
    end
  end
  return lost
end)
