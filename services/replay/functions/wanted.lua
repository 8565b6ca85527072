-- wanted: list prompts that the trainer must supply again, because their groups failed and are retried.
-- KEYS     the run
-- ARGV     none
-- Returns  their orders, the lowest BATCH of them
-- Errors   HR_UNAVAILABLE: no such run
-- uses: _args, _register
register_reader('wanted', nil, function(run) return redis.call('ZRANGE', run.base .. 'wanted', 0, BATCH - 1) end)
