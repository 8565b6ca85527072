"""The weight channel's contract between trainer and replicas, without torch: `headrace_services.weight_channel` moves the tensors."""
