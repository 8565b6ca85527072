"""Controls a run: what the trainer does next, its batches, checkpoints, validation, ranks and refits."""
