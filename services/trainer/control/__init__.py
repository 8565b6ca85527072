"""How a run goes on: what the trainer does next, its batches, checkpoints, validation, ranks and refits."""
