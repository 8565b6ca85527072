-- step: the batch of a step that was handed out and whose payloads are held, for people: `replay.retain_steps` of those that a checkpoint
-- holds, and all since.
-- KEYS     the run
-- ARGV     step
-- Returns  the steps there are (one a line, in order), then as `reserve` the batch if this step is one of them
-- Errors   HR_INVALID
register_reader('hr_step', 1, function(run, args)
  local step, held, found = natural(args[1], 'step'), {}, nil
  -- below `evicted` payloads went under memory pressure
  for candidate = math.max(run.freed, run.evicted, 0), run.next_step - 1 do
    if redis.call('HEXISTS', run.base .. 'steps', candidate) == 1 then
      held[#held + 1] = candidate
      if candidate == step then found = batch_of(run, step, step_ids(run, step)) end
    end
  end
  return {table.concat(held, '\n'), found}
end)
