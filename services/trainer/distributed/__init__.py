"""The ranks of the trainer, and what is spread over them: a wrapper of `torch.distributed`."""
