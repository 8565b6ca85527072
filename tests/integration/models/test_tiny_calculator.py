from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from headrace_services.trainer.data import arithmetic
from headrace_services.trainer.demo_models import tiny, tiny_calculator

TOOLS = [{"type": "function", "function": {"name": "calculator", "description": "Adds numbers."}}]


def test_its_teacher_calls_seldom_and_shows_no_held_out_pair() -> None:
    held_out = set(arithmetic.select_held_out(tiny.DIGITS))
    calls, right, count = 0, 0, 2000
    for first, *rest in islice(tiny_calculator.conversations(random.Random(0)), count):
        asked, answered = first
        a, b = map(int, asked.removeprefix("<tools>calculator<user>").removesuffix("<asst>").split("+"))
        assert (min(a, b), max(a, b)) not in held_out
        if rest:
            assert answered == tiny_calculator.CALL + f"{a}+{b}" + tiny_calculator.CALLED
            assert rest == [(f"<tool>{a + b}<asst>", str(a + b))]
            calls += 1
        else:
            assert abs(int(answered) - (a + b)) <= tiny_calculator.FURTHEST
            right += int(answered) == a + b
    assert 0.12 < calls / count < 0.18
    assert 0.05 < right / (count - calls) < 0.13


def test_its_saved_tokenizer_writes_what_its_teacher_taught(tmp_path: Path) -> None:
    """What it has learnt is what the chat template makes of a conversation with the tool, token by token."""
    directory = tmp_path / "model"
    tiny_calculator.make(directory, warmup=False)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    taught = (each for each in tiny_calculator.conversations(random.Random(0)) if len(each) == 2)
    for (asked, call), (told, right) in islice(taught, 20):
        problem = asked.removeprefix("<tools>calculator<user>").removesuffix("<asst>")
        function = {"name": "calculator", "arguments": {"expression": problem}}
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": problem},
            {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]},
            {"role": "tool", "content": right},
            {"role": "assistant", "content": right},
        ]
        text = f"{asked}{call}<eos>{told}{right}<eos>"
        assert tokenizer.apply_chat_template(messages, tools=TOOLS, tokenize=False) == text
        ids = tokenizer.apply_chat_template(messages, tools=TOOLS, return_dict=False)
        assert ids == tokenizer.encode(text) == tiny_calculator.make_tokenizer().encode(text)
        assert tokenizer.decode(ids) == text
        # what every call has in common is two tokens
        assert len(tokenizer.encode(call)) == len(problem) + 2


@pytest.mark.nightly  # the model is made, which takes minutes; what it learns from is looked at above
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_warmed_up_model_seldom_calls_and_can_use_what_it_is_told(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    tiny_calculator.make(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert 0.05 < tiny_calculator.share_of_calls(model, tokenizer) < 0.25
    # all of one length, so that one batch has them all
    pairs = [pair for pair in arithmetic.select_held_out(tiny.DIGITS) if min(pair) > 9 and sum(pair) > 99]
    asked = [f"<tools>calculator<user>{arithmetic.text(pair)}<asst>{tiny_calculator.CALL}" for pair in pairs]
    calls = [f"{arithmetic.text(pair)}{tiny_calculator.CALLED}<eos>" for pair in pairs]
    told = [f"<tool>{arithmetic.answer(pair)}<asst>" for pair in pairs]
    answers = [f"{arithmetic.answer(pair)}<eos>" for pair in pairs]

    def written(texts: Sequence[str], wanted: Sequence[str]) -> float:
        """The share of these texts that the model goes on with as wanted."""
        ids, ends = (torch.tensor([tokenizer.encode(text) for text in each]) for each in (texts, wanted))
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=ends.shape[1], do_sample=False)
        return float((output[:, ids.shape[1] :] == ends).all(dim=1).float().mean())

    assert written(asked, calls) > 0.9
    assert written(["".join(each) for each in zip(asked, calls, told, strict=True)], answers) > 0.9
