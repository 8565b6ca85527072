"""Trackers (TensorBoard, Weights & Biases, MLflow): each follows `metrics.jsonl` on a thread of its own, through its own library."""
