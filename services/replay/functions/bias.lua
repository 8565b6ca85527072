-- bias: the meters (see _meter.lua).
-- KEYS     the run
-- ARGV     none
-- Returns  for each moment at which there was something: its name, then a list of fields and values
-- Errors   none
register_reader('hr_bias', 0, function(run)
  local reply = {}
  for _, moment in ipairs({'generated', 'trained', 'masked', 'expired', 'filtered', 'failed', 'surplus'}) do
    local flat = redis.call('HGETALL', run.key .. ':m:' .. moment)
    if #flat > 0 then reply[#reply + 1], reply[#reply + 2] = moment, flat end
  end
  return reply
end)
