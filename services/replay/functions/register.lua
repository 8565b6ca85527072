-- register: a replica enters the fleet as STALE.
-- KEYS     the run
-- ARGV     replica (a nonce, never used again once it has left or died), incarnation, info (what people see of it: names, each with a text, a
--          number or a flag)
-- Returns  1; a replica that is in the fleet stays as it is
-- Errors   HR_FENCED (it has left or died), HR_TIMELINE, HR_INVALID
-- uses: _args, _fleet, _register, _run

-- Everybody who looks at the fleet reads it: packed anew, it is what they can read.
local function info(value, what)
  for field, said in pairs(map(value, what)) do
    text(field, 'a name in ' .. what)
    if type(said) == 'number' then finite(said, field) elseif type(said) ~= 'boolean' then text(said, field) end
  end
  return next(value) == nil and '\128' or cmsgpack.pack(value)  -- cmsgpack would write an empty list
end

register('register', {replica = name, incarnation = text, info = info}, function(run, call)
  local id = call.replica
  require_incarnation(run, call.incarnation)
  local state = redis.call('HGET', replica_key(run, id), 'state')
  if state == 'DEAD' or redis.call('SISMEMBER', run.key .. ':used', id) == 1 then
    refuse('HR_FENCED', 'replica ' .. id .. ' has left or died; enter the fleet under a new name')
  end
  if state then return 1 end
  redis.call('HSET', replica_key(run, id), 'state', 'STALE', 'version', -1, 'timeline', run.timeline, 'info', call.info)
  see(run, id)
  event(run, 'replica', 'replica', id, 'state', 'STALE')
  wake(run, 'epoch')
  return 1
end)
