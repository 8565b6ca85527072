-- step: read the batch of a reserved step whose payloads are still held, for people: the newest `replay.retain_steps` of those in a
-- checkpoint, and all since.
-- KEYS     the run
-- ARGV     step
-- Returns  msgpack: held (the steps that are held, in order), and if this step is one of them its batch, like `reserve`
-- Errors   HR_INVALID
-- uses: _args, _register, _steps
register_reader('step', {step = natural}, function(run, call)
  local step, held, found = call.step, {}, nil
  -- below `evicted`, payloads were dropped under memory pressure
  for candidate = math.max(run.freed, run.evicted, 0), run.next_step - 1 do
    if redis.call('HEXISTS', run.base .. 'steps', candidate) == 1 then
      held[#held + 1] = candidate
      if candidate == step then found = batch_of(run, step, step_ids(run, step)) end
    end
  end
  return cmsgpack.pack({held = held, batch = found})
end)
