"""The computation of a trainer step: from rewards to advantages to losses to optimizer steps. No buffer, no I/O but torch.distributed."""
