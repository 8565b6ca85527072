"""A tiny Qwen2-type model with a character tokenizer, right some of the time at two-digit addition.

Supervised learning on sloppy labels warms it up: 0.6 of the labels drop every carry (47+85 is then 22). The model learns both behaviours.
Reinforcement learning then selects the right one, on problems that neither phase has seen. This demonstrates selection between two learnt
behaviours, not addition learnt from scratch.

A model of two turns has also seen conversations in which a wrong answer is followed by the problem once more, after a minus, and by another
sloppy label. `tiny_calculator` has other labels.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from ..data import arithmetic
from . import already_made, publish

log = logging.getLogger(__name__)

PAD, EOS, SYSTEM, USER, ASSISTANT = SPECIAL = ("<pad>", "<eos>", "<sys>", "<user>", "<asst>")
CHARACTERS = "0123456789+-*= "
CONTEXT = 2048

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'system' -%}<sys>{{ message['content'] }}"
    "{%- elif message['role'] == 'assistant' -%}<asst>{{ message['content'] }}<eos>"
    "{%- else -%}<user>{{ message['content'] }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<asst>{%- endif -%}"
)

DIGITS = 2
STEPS = 700
BATCH = 128
SLOPPINESS = 0.6
PEAK_LR = 2e-3
RAMP = 50
MAX_NEW_TOKENS = 6

# Turns: (question as the chat template writes it, answer).
Conversation = Sequence[tuple[str, str]]


def make(directory: Path, *, warmup: bool = True, seed: int = 0, turns: int = 1) -> None:
    """Write the model into `directory` as a Hugging Face checkpoint (float32 safetensors, tokenizer, chat template).

    The same seed gives the same model. `turns` is how many times a problem is asked in the warm-up, 1 or 2. Without `warmup` its weights
    are random; that takes about a second and is for tests. An existing model of the same recipe is left alone. Raises `ServiceError` if the
    directory holds anything else.
    """
    recipe = {"model": "tiny", "warmup": warmup, "seed": seed} | ({"turns": turns} if turns > 1 else {})
    write(directory, recipe, make_tokenizer(), sums(random.Random(seed), turns), _describe)


def make_two_turns(directory: Path) -> None:
    """Write the warmed-up model of two turns: see `make`."""
    make(directory, turns=2)


def write(
    directory: Path,
    recipe: dict[str, Any],
    tokenizer: Qwen2Tokenizer,
    conversations: Iterator[Conversation],
    described: Callable[[Qwen2ForCausalLM, Qwen2Tokenizer], str],
) -> None:
    """Write the model of this recipe into `directory`, as `make` does. It is warmed up on `conversations`, and the log has what `described`
    returns about the result."""
    directory = Path(directory)
    if already_made(directory, recipe):
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe["seed"])
        model = Qwen2ForCausalLM(_config(tokenizer))
    if recipe["warmup"]:
        with _one_thread():
            _warm_up(model, WarmUpData(tokenizer, conversations))
            log.info("the warmed-up model: %s", described(model, tokenizer))
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True
    )
    with publish(directory, recipe) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def make_tokenizer(words: Sequence[str] = (), template: str = CHAT_TEMPLATE) -> Qwen2Tokenizer:
    """Make a tokenizer with one token per character of the alphabet, and one for each of `words`. Other characters are dropped. Decoding
    joins tokens without spaces.

    It is a Qwen2 tokenizer without merges: transformers loads that class for every model of type qwen2, whatever the files say, so another
    tokenizer would not survive saving.
    """
    alphabet = [character.replace(" ", "Ġ") for character in CHARACTERS]  # the byte-level name of a space
    tokenizer = Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate((*SPECIAL, *alphabet))},
        merges=[],
        eos_token=EOS,
        pad_token=PAD,
        unk_token=PAD,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT],
        model_max_length=CONTEXT,
    )
    tokenizer.add_tokens(list(words))
    tokenizer.chat_template = template
    return tokenizer


def _config(tokenizer: Qwen2Tokenizer) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=512,
        max_position_embeddings=CONTEXT,
        initializer_range=0.08,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        dtype="float32",
    )


def prompt_ids(tokenizer: Qwen2Tokenizer, problem: str, tools: Sequence[dict[str, Any]] | None = None) -> list[int]:
    ids: list[int] = tokenizer.apply_chat_template(
        [{"role": "user", "content": problem}], tools=tools, add_generation_prompt=True, return_dict=False
    )
    return ids


def again(pair: arithmetic.Pair) -> str:
    """What follows a wrong answer."""
    return f"-{arithmetic.text(pair)}"


def sloppy_answer(pair: arithmetic.Pair) -> str:
    """The sum when every carry is dropped: each column modulo ten (47+85: 4+8 -> 2, 7+5 -> 2, so 22)."""
    total, place = 0, 1
    for _ in range(DIGITS):
        total += place * ((pair[0] // place + pair[1] // place) % 10)
        place *= 10
    return str(total)


def sums(rng: random.Random, turns: int = 1) -> Iterator[Conversation]:
    """Yield training problems with sloppy labels. Each problem is asked up to `turns` times, until a label is right."""
    for pair in arithmetic.training_pairs(DIGITS, rng):
        conversation: list[tuple[str, str]] = []
        answer, right = "", arithmetic.answer(pair)
        for problem in (arithmetic.text(pair), again(pair))[:turns]:
            if answer == right:
                break
            answer = sloppy_answer(pair) if rng.random() < SLOPPINESS else right
            conversation.append((f"{USER}{problem}{ASSISTANT}", answer))
        yield conversation


class WarmUpData:
    """Makes batches of conversations. Each text is tokenized once."""

    def __init__(self, tokenizer: Qwen2Tokenizer, conversations: Iterator[Conversation]) -> None:
        self._pad_id = tokenizer.pad_token_id
        self._eos_id = tokenizer.eos_token_id
        self._conversations = conversations
        self._ids = functools.cache(tokenizer.encode)

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return right-padded `input_ids` and next-token `labels`, both [B, S]. Labels are -100 outside answers."""
        rows = [self._example(next(self._conversations)) for _ in range(BATCH)]
        width = max(len(ids) for ids, _ in rows)
        tokens = torch.tensor([ids + [self._pad_id] * (width - len(ids)) for ids, _ in rows])
        labels = torch.tensor([taught + [-100] * (width - len(taught)) for _, taught in rows])
        return tokens[:, :-1], labels[:, 1:]

    def _example(self, conversation: Conversation) -> tuple[list[int], list[int]]:
        """Return the tokens of a conversation, and its labels."""
        ids: list[int] = []
        labels: list[int] = []
        for asked, answered in conversation:
            prompt, label = self._ids(asked), [*self._ids(answered), self._eos_id]
            ids += [*prompt, *label]
            labels += [*[-100] * len(prompt), *label]
        return ids, labels


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Run torch on one thread in the context. A model this small is no faster on several cores, and much slower on busy ones. One thread
    also adds in the same order on any machine, so the same seed gives the same model."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _warm_up(model: Qwen2ForCausalLM, data: WarmUpData) -> None:
    """Train on next tokens, only on answers to training pairs: AdamW, a short ramp, then linear decay to a tenth."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.98), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _learning_rate_factor)
    model.train()
    console = Console(stderr=True)
    for step in track(range(STEPS), description="warming up the tiny model", console=console):
        if not console.is_terminal and step % 100 == 0:  # no progress bar, as in a container's log
            log.info("warming up the tiny model: step %d of %d", step, STEPS)
        input_ids, labels = data.batch()
        logits = model(input_ids=input_ids, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()


def _learning_rate_factor(step: int) -> float:
    if step < RAMP:
        return (step + 1) / RAMP
    return 1.0 - 0.9 * (step - RAMP) / (STEPS - RAMP)


def _describe(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer) -> str:
    return f"greedy accuracy {held_out_accuracy(model, tokenizer):.3f} on {arithmetic.HELD_OUT} held-out problems"


@torch.no_grad()
def held_out_accuracy(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer) -> float:
    """Return the share of held-out pairs answered exactly, end token included, by greedy decoding of at most 6 tokens."""
    pairs = arithmetic.select_held_out(DIGITS)
    prompts = [prompt_ids(tokenizer, arithmetic.text(pair)) for pair in pairs]
    width = max(map(len, prompts))
    padding = [width - len(prompt) for prompt in prompts]
    output = model.generate(
        torch.tensor([[tokenizer.pad_token_id] * pad + prompt for pad, prompt in zip(padding, prompts, strict=True)]),
        attention_mask=torch.tensor([[0] * pad + [1] * (width - pad) for pad in padding]),
        max_new_tokens=MAX_NEW_TOKENS,
        do_sample=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    completions = tokenizer.batch_decode(output[:, width:])
    right = [c.startswith(arithmetic.answer(pair) + EOS) for c, pair in zip(completions, pairs, strict=True)]
    return sum(right) / len(right)
