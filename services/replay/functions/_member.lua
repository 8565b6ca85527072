-- Members: how replicas and runners enter and leave.
-- uses: _args, _due, _fleet, _register

-- The info about a member that people see: names, each with a text, a number or a flag. It is repacked, so that they can read it.
local function member_info(value, what)
  for field, said in pairs(map(value, what)) do
    text(field, 'a name in ' .. what)
    if type(said) == 'number' then finite(said, field) elseif type(said) ~= 'boolean' then text(said, field) end
  end
  return next(value) == nil and '\128' or cmsgpack.pack(value)  -- cmsgpack would write an empty list
end

-- Add a member in `state` with these fields. A member that is already present stays as it is.
local function enter(run, holder, state, ...)
  local before = redis.call('HGET', replica_key(run, holder), 'state')
  if before == 'DEAD' or redis.call('SISMEMBER', run.key .. ':used', holder) == 1 then
    local kind, id = told_apart(holder)
    refuse('HR_FENCED', kind .. ' ' .. id .. ' has left or died; register under a new name')
  end
  if before then return end
  redis.call('HSET', replica_key(run, holder), 'state', state, ...)
  see(run, holder)
  tell_state(run, holder, state)
end

-- Remove a member. Returns the number of groups that it still holds: repeat the call until 0.
local function leave_fleet(run, holder, died)
  local key = replica_key(run, holder)
  if redis.call('EXISTS', key) == 0 then return 0 end
  local held = redis.call('SCARD', run.base .. 'h:' .. holder)
  redis.call('HSETNX', key, 'left_with', held)
  if not take_back(run, holder, died) then return redis.call('SCARD', run.base .. 'h:' .. holder) end
  redis.call('UNLINK', key)
  redis.call('ZREM', registry_of(run, holder), holder)
  uncount(run, holder)
  retire(run, holder)
  tell_state(run, holder, 'LEFT')
  return 0
end
