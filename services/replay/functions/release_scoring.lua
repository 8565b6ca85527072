-- release_scoring: a scorer starts; what an earlier one had taken waits again at once, without costing an attempt.
-- KEYS     the run
-- ARGV     none
-- Returns  trajectories still to be released: call again until 0
-- uses: _register, _scoring
register('hr_release_scoring', nil, function(run) return void_taken(run) end)
