"""What a trainer step computes: rewards to advantages to losses to optimizer steps. No queue, no network but torch.distributed."""
