"""The contents of a run's folder: journal, history, samples, checkpoints, lineage, exports, evaluations."""
