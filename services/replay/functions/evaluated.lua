-- evaluated: read the state of validation groups.
-- KEYS     the run
-- ARGV     groups (their ids)
-- Returns  msgpack: for each group its state, reason, record (key) and keys of its payloads in index order (only if evaluated); its state
--          is `unknown` if the validation lane does not hold it (it was dropped, or the server lost writes)
-- Errors   HR_INVALID
-- uses: _args, _group, _register
register('evaluated', {groups = list_of(name, BATCH)}, function(run, call)
  local reply = {}
  for i, id in ipairs(call.groups) do
    local group = load_group(run, id)
    if not group or group.lane ~= 'validation' then
      reply[i] = {state = 'unknown'}
    else
      local keys = {}
      if group.state == 'evaluated' then
        for j, key in ipairs((payload_keys(run, group))) do
          if j % 2 == 1 then keys[#keys + 1] = key end
        end
      end
      reply[i] = {state = group.state, reason = group.reason or '', record = run.base .. 'd:' .. group.record, keys = keys}
    end
  end
  return cmsgpack.pack(reply)
end)
