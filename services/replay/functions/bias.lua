-- bias: read the meters (see _meter.lua).
-- KEYS     the run
-- ARGV     none
-- Returns  msgpack: for each moment that has any data, its name and its fields
-- Errors   none
-- uses: _args, _register
register_reader('bias', nil, function(run)
  local moments = {}
  for _, moment in ipairs({'generated', 'trained', 'masked', 'expired', 'filtered', 'failed', 'surplus'}) do
    local flat = redis.call('HGETALL', run.key .. ':m:' .. moment)
    if #flat > 0 then moments[#moments + 1] = {moment, numbers(flat)} end
  end
  return cmsgpack.pack(moments)
end)
