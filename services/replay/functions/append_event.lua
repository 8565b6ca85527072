-- append_event: something that a service has seen, for people.
-- KEYS     the run
-- ARGV     kind, fields (names and values in turn)
-- Returns  1
-- Errors   HR_INVALID
-- uses: _args, _register, _run
register('hr_append_event', {kind = text, fields = list_of(text, BATCH)}, function(run, call)
  if #call.fields % 2 == 1 then refuse('HR_INVALID', #call.fields .. ' fields are not names and values in turn') end
  event(run, call.kind, unpack(call.fields))
  return 1
end)
