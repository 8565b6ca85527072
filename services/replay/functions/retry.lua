-- retry: generate failed train groups again, for the operator.
-- KEYS     the run
-- ARGV     incarnation, orders (of the groups), retries (how often each was retried before)
-- Returns  how many of them had failed
-- Errors   HR_TIMELINE: a restore installed another incarnation; HR_INVALID
--
-- Law 1: a failure is final until a retry, and each retry belongs to one failure. A call that arrives again, however late, names an old
-- number and changes nothing. The group's count, bits and dead letter are removed together. Its prompt is `wanted`: the trainer supplies it
-- again, as in a refill.
-- uses: _args, _group, _register, _run

-- Returns its id, or '' if it was forgotten before.
local function forget_dead_letter(run, order)
  local id = redis.call('HGET', run.base .. 'letters', order)
  if not id then return '' end
  erase(run, load_group(run, id))
  redis.call('ZREM', run.base .. 'failed', id)
  redis.call('HDEL', run.base .. 'letters', order)
  return id
end

register('retry', {
  incarnation = text, orders = list_of(natural, BATCH), retries = list_of(natural, BATCH),
}, function(run, call)
  require_incarnation(run, call.incarnation)
  if #call.orders ~= #call.retries then refuse('HR_INVALID', #call.orders .. ' orders, and ' .. #call.retries .. ' entries of retries') end
  local again = 0
  for i, order in ipairs(call.orders) do
    local retried = tonumber(redis.call('HGET', run.base .. 'retries', order) or 0)
    if order <= run.enqueued and retried == call.retries[i] and redis.call('GETBIT', run.base .. 'failures', order) == 1 then
      local id = forget_dead_letter(run, order)
      redis.call('SETBIT', run.base .. 'failures', order, 0)
      redis.call('SETBIT', run.base .. 'ended', order, 0)
      redis.call('HINCRBY', run.base .. 'retries', order, 1)
      redis.call('ZADD', run.base .. 'wanted', order, order)
      move(run, 'train', 'failed', nil)
      tell(run, 'retried', id, {'o', order})
      again = again + 1
    end
  end
  if again > 0 then event(run, 'retried', 'groups', again) end
  return again
end)
