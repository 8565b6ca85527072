-- step: the batch of a step that was handed out and whose payloads are held, for people: `replay.retain_steps` of those that a checkpoint
-- holds, and all since.
-- KEYS     the run
-- ARGV     step
-- Returns  msgpack: held (the steps there are, in order), and as `reserve` the batch if this step is one of them
-- Errors   HR_INVALID
-- uses: _args, _register, _steps
register_reader('step', {step = natural}, function(run, call)
  local step, held, found = call.step, {}, nil
  -- below `evicted` payloads went under memory pressure
  for candidate = math.max(run.freed, run.evicted, 0), run.next_step - 1 do
    if redis.call('HEXISTS', run.base .. 'steps', candidate) == 1 then
      held[#held + 1] = candidate
      if candidate == step then found = batch_of(run, step, step_ids(run, step)) end
    end
  end
  return cmsgpack.pack({held = held, batch = found})
end)
