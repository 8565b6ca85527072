"""The weight channel's contract between trainer and replicas, without torch: `services.weight_channel` moves the tensors."""
