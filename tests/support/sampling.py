"""Completions of two-digit sums drawn from given weights in one process, so that a batch has exactly the age an experiment asks for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from random import Random

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from headrace.records.trajectory import Float32, Int32
from headrace_services.trainer.data import arithmetic
from headrace_services.trainer.learning.batch import Batch
from tests.support.trainer import batch, trajectory

DIGITS = 2


@dataclasses.dataclass(frozen=True)
class Completion:
    """What one draw gave: `token_ids` and `logprobs` [T] (its end token included), and 1.0 for the sum with its end token, else 0."""

    prompt_token_ids: Int32
    token_ids: Int32
    logprobs: Float32
    reward: float
    ended: bool


class Sampler:
    """Generates with transformers from whatever weights it was last given."""

    def __init__(self, model: Path, max_new_tokens: int) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self._max_new_tokens = max_new_tokens

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Take `weights` by their names in a Hugging Face checkpoint; a tied head is left out."""
        missing, unexpected = self._model.load_state_dict(weights, strict=False)
        if unexpected or set(missing) - {"lm_head.weight"}:
            raise ValueError(f"weights of another model: {unexpected} are unknown, {missing} are missing")

    def weights(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self._model.named_parameters()}

    def draw(self, pairs: Sequence[arithmetic.Pair], generations: int, seed: int) -> list[Completion]:
        """`generations` completions of each sum at temperature 1, one sum after the other. The same seed draws the same."""
        torch.manual_seed(seed)
        return self._generate([pair for pair in pairs for _ in range(generations)], sample=True)

    def accuracy(self, pairs: Sequence[arithmetic.Pair]) -> float:
        """Share of the sums that are right when the likeliest token is always taken."""
        completions = self._generate(pairs, sample=False)
        return sum(completion.reward for completion in completions) / len(completions)

    def _generate(self, pairs: Sequence[arithmetic.Pair], *, sample: bool) -> list[Completion]:
        prompts = [self._prompt(pair) for pair in pairs]
        batch = self._tokenizer.pad({"input_ids": prompts}, return_tensors="pt")
        with torch.no_grad():
            made = self._model.generate(
                **batch,
                max_new_tokens=self._max_new_tokens,
                do_sample=sample,
                temperature=1.0 if sample else None,
                top_k=0 if sample else None,
                top_p=1.0 if sample else None,
                output_logits=True,
                return_dict_in_generate=True,
            )
        written = made.sequences[:, batch["input_ids"].shape[1] :]
        logprobs = torch.stack(made.logits, dim=1).float().log_softmax(-1).gather(-1, written[..., None])[..., 0]
        return [
            self._completion(pair, prompt, tokens, values)
            for pair, prompt, tokens, values in zip(pairs, prompts, written, logprobs, strict=True)
        ]

    def _prompt(self, pair: arithmetic.Pair) -> list[int]:
        message = {"role": "user", "content": arithmetic.text(pair)}
        ids: list[int] = self._tokenizer.apply_chat_template(
            [message], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        return ids

    def _completion(self, pair: arithmetic.Pair, prompt: list[int], tokens: Tensor, logprobs: Tensor) -> Completion:
        ends = (tokens == self._tokenizer.eos_token_id).nonzero()
        length = int(ends[0]) + 1 if len(ends) else len(tokens)
        text = self._tokenizer.decode(tokens[:length], skip_special_tokens=True).strip()
        right = text.isdecimal() and int(text) == sum(pair)
        return Completion(
            torch.tensor(prompt, dtype=torch.int32).numpy(),
            tokens[:length].to(torch.int32).numpy(),
            logprobs[:length].numpy(),
            float(right and len(ends) > 0),
            len(ends) > 0,
        )


def batch_of(
    drawn: Sequence[Completion],
    generations: int,
    *,
    age: int = 0,
    components: Sequence[Mapping[str, float]] | None = None,
) -> Batch:
    """Completions as the learner takes them, `generations` a group, all tokens `age` versions old."""
    trajectories = [
        trajectory(
            one.prompt_token_ids.tolist(),
            one.token_ids.tolist(),
            one.logprobs.tolist(),
            group=f"sum {place // generations}",
            index=place % generations,
            finish_reason="stop" if one.ended else "length",
        )
        for place, one in enumerate(drawn)
    ]
    rewards = [one.reward for one in drawn]
    return batch(trajectories, rewards, components=components, environment="sums", step=age)


def problems(seed: int, count: int) -> Iterator[list[arithmetic.Pair]]:
    """Endless batches of `count` sums that are not held out."""
    pairs = arithmetic.training_pairs(DIGITS, Random(seed))
    while True:
        yield list(islice(pairs, count))


def held_out() -> list[arithmetic.Pair]:
    return list(arithmetic.validation_pairs(DIGITS, Random(0)))
