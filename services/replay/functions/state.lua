-- state: read the state of the run.
-- KEYS     the run
-- ARGV     none
-- Returns  the run's state, msgpack
-- Errors   HR_UNAVAILABLE: no such run
-- uses: _register
register_reader('state', nil, function(run) return cmsgpack.pack(run_state(run)) end)
