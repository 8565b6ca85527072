"""A refit: how the weights of the trainer reach the replicas, and the proof that both compute alike."""
