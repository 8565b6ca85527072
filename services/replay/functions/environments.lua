-- environments: read the state of each environment, for scorers and people.
-- KEYS     the run
-- ARGV     none
-- Returns  msgpack: for each environment, by name: name, waiting (trajectories), alone (those of them that go out alone), taken, failing
--          (of the last results), broken; and if it is broken: kind, message, traceback, broken_s (for how long), probes (failed in a row),
--          probe_in_s
-- uses: _group, _register, _scoring
local FIELDS_OF_BROKEN = {'since', 'kind', 'message', 'traceback', 'probes', 'probe_at'}

register_reader('environments', nil, function(run)
  local names, found = environments_of(run), {}
  table.sort(names)
  for i, env in ipairs(names) do
    local function count(place) return redis.call('ZCARD', place_of(run, place, env)) end
    local alone = count('alone')
    local entry = {
      name = env, waiting = count('unscored') + alone, alone = alone, taken = count('taken'), failing = count('failing'),
      broken = is_broken(run, env),
    }
    if entry.broken then
      local since, kind, message, traceback, probes, probe_at =
        unpack(redis.call('HMGET', environment_key(run, env), unpack(FIELDS_OF_BROKEN)))
      entry.kind, entry.message, entry.traceback, entry.probes = kind, message, traceback, tonumber(probes)
      entry.broken_s, entry.probe_in_s = (run.now - since) / 1000, math.max(0, (probe_at - run.now) / 1000)
    end
    found[i] = entry
  end
  return cmsgpack.pack(found)
end)
