-- state: where the run stands.
-- KEYS     the run
-- ARGV     none
-- Returns  the run's state, msgpack
-- Errors   HR_UNAVAILABLE: no such run
register_reader('hr_state', 0, function(run) return cmsgpack.pack(run_state(run)) end)
