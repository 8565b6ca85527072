-- drained: the trainer has written the entries of `history` up to and including this one to the run's folder; delete them here. Idempotent.
-- KEYS     the run
-- ARGV     timeline, last (the id of the entry)
-- Returns  1
-- Errors   HR_TIMELINE, HR_INVALID
-- uses: _args, _register, _run
register('drained', {timeline = text, last = text}, function(run, call)
  require_timeline(run, call.timeline)
  local ms, number = string.match(call.last, '^(%d+)-(%d+)$')
  if not ms then refuse('HR_INVALID', 'last is ' .. show(call.last) .. ', not the id of an entry') end
  local first, second = natural(tonumber(ms), 'the time of last'), natural(tonumber(number), 'the number of last')
  redis.call('XTRIM', run.key .. ':history', 'MINID', string.format('%d-%d', first, second + 1))
  return 1
end)
