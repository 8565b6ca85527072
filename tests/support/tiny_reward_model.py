"""A real sequence-classification model, small enough to be made in a test."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForSequenceClassification

from headrace_services.trainer.demo_models.tiny import make_tokenizer

CONTEXT = 64


def make_reward_model(directory: Path, labels: int = 1) -> Path:
    """Qwen2 with random weights and the character tokenizer of the demo's model, in `directory`."""
    tokenizer = make_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        config = Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=CONTEXT,
            pad_token_id=tokenizer.pad_token_id,
            num_labels=labels,
            initializer_range=0.5,
        )
        Qwen2ForSequenceClassification(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
