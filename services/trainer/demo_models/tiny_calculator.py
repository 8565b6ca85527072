"""The tiny model with a calculator, for `examples/calculator.yaml`: it knows how to call the tool, and seldom does.

In 0.15 of its warm-up conversations the answer calls the tool, and then repeats the tool's result. In the others it is a guess that is off
by at most five. Calls have the format of Hermes, which vLLM's parser `hermes` reads. The text that all calls share is one token; in a model
with letters it would be many.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2ForCausalLM, Qwen2Tokenizer

from ..data import arithmetic
from . import tiny

CALL, CALLED = '<tool_call>{"name": "calculator", "arguments": {"expression": "', '"}}</tool_call>'
TOOLS, TOOL, NAME = "<tools>", "<tool>", "calculator"
WORDS = (TOOLS, NAME, TOOL, CALL, CALLED)

# It shows only the name of a tool: the alphabet has no letters for a description.
CHAT_TEMPLATE = (
    "{%- for tool in tools or [] -%}<tools>{{ tool['function']['name'] }}{%- endfor -%}"
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'system' -%}<sys>{{ message['content'] }}"
    "{%- elif message['role'] == 'assistant' -%}<asst>{{ message['content'] or '' }}"
    "{%- for call in message['tool_calls'] or [] -%}"
    "<tool_call>{\"name\": \"{{ call['function']['name'] }}\", \"arguments\": {{ call['function']['arguments'] | tojson }}}</tool_call>"
    "{%- endfor -%}<eos>"
    "{%- elif message['role'] == 'tool' -%}<tool>{{ message['content'] }}"
    "{%- else -%}<user>{{ message['content'] }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<asst>{%- endif -%}"
)

CALLING = 0.15
FURTHEST = 5


def make(directory: Path, *, warmup: bool = True, seed: int = 0) -> None:
    """Write the model into `directory`: see `tiny.make`."""
    recipe = {"model": "tiny-calculator", "warmup": warmup, "seed": seed}
    tiny.write(directory, recipe, make_tokenizer(), conversations(random.Random(seed)), _describe)


def make_tokenizer() -> Qwen2Tokenizer:
    return tiny.make_tokenizer(WORDS, CHAT_TEMPLATE)


def conversations(rng: random.Random) -> Iterator[tiny.Conversation]:
    """Yield warm-up conversations about training problems."""
    for pair in arithmetic.training_pairs(tiny.DIGITS, rng):
        problem, right = arithmetic.text(pair), arithmetic.answer(pair)
        asked = f"{TOOLS}{NAME}{tiny.USER}{problem}{tiny.ASSISTANT}"
        if rng.random() < CALLING:
            yield [(asked, f"{CALL}{problem}{CALLED}"), (f"{TOOL}{right}{tiny.ASSISTANT}", right)]
        else:
            yield [(asked, str(int(right) + rng.randint(-FURTHEST, FURTHEST)))]


def _describe(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer) -> str:
    return f"calls the calculator in {share_of_calls(model, tokenizer):.3f} of its answers to held-out problems"


@torch.no_grad()
def share_of_calls(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer) -> float:
    """Return the probability that an answer to a held-out problem begins with a call."""
    call = tokenizer.convert_tokens_to_ids(CALL)
    tools: list[dict[str, Any]] = [{"function": {"name": NAME}}]
    shares = []
    for pair in arithmetic.select_held_out(tiny.DIGITS):
        asked = tiny.prompt_ids(tokenizer, arithmetic.text(pair), tools)
        shares.append(float(model(torch.tensor([asked])).logits[0, -1].softmax(-1)[call]))
    return sum(shares) / len(shares)
