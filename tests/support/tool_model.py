"""A tiny Qwen2-type model of random weights that can write any text, with a chat template that has tools and reasoning."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

END, START, THINK, THOUGHT = SPECIAL = ("<|im_end|>", "<|im_start|>", "<think>", "</think>")
CONTEXT = 2048

# As Qwen3's, in short: reasoning of earlier answers is left out, tool calls are written as Hermes does.
TEMPLATE = """\
{%- if tools -%}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif -%}
{%- for message in messages -%}<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] -%}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{%- endfor -%}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% if no_thinking %}<think></think>{% endif %}{%- endif -%}
"""


def make_tokenizer() -> Qwen2Tokenizer:
    """One token per byte, and three for what the model often writes."""
    alphabet = sorted(ByteLevel.alphabet())
    tokenizer = Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate((*SPECIAL, *alphabet))},
        merges=[],
        eos_token=END,
        pad_token=END,
        unk_token=None,
        additional_special_tokens=[START],
        model_max_length=CONTEXT,
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make(directory: Path) -> Path:
    """Write the model into `directory`."""
    tokenizer = make_tokenizer()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(
            Qwen2Config(
                vocab_size=len(tokenizer),
                hidden_size=64,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=2,
                intermediate_size=128,
                max_position_embeddings=CONTEXT,
                initializer_range=0.08,
                tie_word_embeddings=True,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
                bos_token_id=None,
                dtype="float32",
            )
        )
        # it is never the likeliest token, so that greedy completions are as long as a test wants them
        model.model.embed_tokens.weight[tokenizer.eos_token_id].zero_()
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, do_sample=True)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
