-- append_event: append an event that a service has observed, for people.
-- KEYS     the run
-- ARGV     client, number (of this client's call, higher than any before), kind, fields (names and values in turn)
-- Returns  1. A call that arrives again, or late, changes nothing
-- Errors   HR_INVALID
-- uses: _args, _register, _run
register('append_event', {client = name, number = positive, kind = text, fields = list_of(text, BATCH)}, function(run, call)
  if #call.fields % 2 == 1 then refuse('HR_INVALID', #call.fields .. ' fields are not names and values in turn') end
  if not made_before(run, 'event', call) then event(run, call.kind, unpack(call.fields)) end
  return 1
end)
