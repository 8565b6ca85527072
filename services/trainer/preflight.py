"""Checks what a run's configuration names before the run starts, for `headrace config check` and at the start of `headrace up`."""

from __future__ import annotations

import difflib
import time
from collections import Counter
from collections.abc import Callable, Iterator

from headrace.config import Config
from headrace.config.keys import Keys
from headrace.run.metric_names import METRIC_SECTIONS, unknown

from .control.checkpoint import Checkpoints
from .control.resume import check_prompts
from .data.problems import load_problems, look_at
from .data.prompts import Prompts, digest_problems
from .data.sources import describe_columns, on_the_hub

# Metrics of `train:` that a checkpoint has.
_OF_A_STEP = ("reward",)
_SAY_EVERY_S = 2.0


def look(config: Config) -> Iterator[tuple[Keys, str]]:
    """Yield what is wrong with the names of metrics and with the data, as (keys, message).

    Files are opened, and the first problem of each is read; for a run that continues, all problems are. Nothing heavy is loaded, and no hub
    is asked. Raises `ServiceError` if the data has changed since the run's checkpoint.
    """
    problems = [*_metric_name(config), *look_at(config.data)]
    yield from problems
    # without the tokenizer the overlong prompts aren't known, and without the Hub its data isn't
    known = config.data.overlong_prompts == "refuse" and not any(map(on_the_hub, config.data.sources))
    if known and not problems:
        _check_unchanged(config, lambda: digest_problems(*load_problems(config.data, Counter(), config.env)))


def _check_unchanged(config: Config, digest: Callable[[], str]) -> None:
    """Raise `ServiceError` if the run continues from a checkpoint that was trained on other prompts than those with this digest."""
    if config.run.id is None:
        return
    checkpoints = Checkpoints(config.checkpoint_folder, config.checkpointing)
    newest = checkpoints.newest()
    if newest is not None:
        check_prompts(checkpoints.state(newest), checkpoints.path(newest), digest())


def _metric_name(config: Config) -> Iterator[tuple[Keys, str]]:
    name = config.checkpointing.metric_name
    if name is None:
        return
    kind, _, metric = name.partition(":")
    of_validation = next(section for section in METRIC_SECTIONS if section.title == "Validation")
    known = [f"val:{each.name}" for each in of_validation.metrics] + [f"train:{each}" for each in _OF_A_STEP]
    if f"{kind}:{metric}" in known or (kind == "val" and not unknown([metric])):
        return
    close = difflib.get_close_matches(name, known, 1, 0.6) or ["val:accuracy"]
    yield (
        ("checkpointing", "metric_name"),
        f"checkpointing.metric_name {name!r} is not a metric of a checkpoint, so no checkpoint could be the best; did you mean "
        f"{close[0]}? (The metrics are {', '.join(known)})",
    )


def count(config: Config, say: Callable[[str], None]) -> tuple[list[str], list[str]]:
    """Look at the model's configuration, and read and tokenize all prompts of the run. Returns lines that describe them, and warnings.
    `say` is called with the progress.

    Raises `HeadraceError` for a model, a tokenizer, a data set or a prompt that can't be used. Data sets of the Hugging Face Hub are left
    to the trainer.
    """
    sets = [
        (f"data.{part}[{number}]", source)
        for part, sources in (("train", config.data.train), ("validation", config.data.validation))
        for number, source in enumerate(sources)
    ]
    for key, source in sets:
        if on_the_hub(source):
            name = source.dataset_name or source.data_path
            return [], [
                f"the prompts are not counted: {key} {name} is a data set of the Hugging Face Hub, read when the run starts"
            ]
    try:
        from .network.policy_model import check_refit, load_tokenizer  # imports torch
    except ModuleNotFoundError as error:
        return [], [
            f"the prompts are not counted, because the package {error.name!r} is missing: pip install 'headrace[trainer]'"
        ]
    check_refit(config)
    tokenizer = load_tokenizer(config)
    prompts = Prompts(config, tokenizer)
    counts = prompts.counts
    counts.check(config)
    _check_unchanged(config, lambda: counts.digest)
    total = counts.train + min(counts.validation, config.algorithm.max_val_samples)
    special = {tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id}
    # some tokenizers lack an unknown token, and name another special token instead
    unknown_id = None if tokenizer.unk_token_id in special else tokenizer.unk_token_id
    lengths: list[int] = []
    unknown_tokens, empty, characters = 0, 0, Counter[str]()
    reported = time.monotonic()
    for problem, ids in prompts.encode():
        lengths.append(len(ids))
        empty += not any(message["content"].strip() for message in problem.messages if message["role"] != "system")
        for message in problem.messages:
            characters.update(message["content"])
        unknown_tokens += ids.count(unknown_id) if unknown_id is not None else 0
        if time.monotonic() - reported >= _SAY_EVERY_S:
            reported = time.monotonic()
            say(f"tokenized {len(lengths)} of {total} prompts")
    context, new = config.policy.max_total_sequence_length, config.policy.generation.max_new_tokens
    limit, key = context - 1, f"policy.max_total_sequence_length {context}"
    if config.data.max_input_seq_length is not None and config.data.max_input_seq_length < limit:
        limit, key = config.data.max_input_seq_length, f"data.max_input_seq_length {config.data.max_input_seq_length}"
    lines = [
        *counts.lines(config),
        *(line for key, source in sets for line in describe_columns(source, key)),
        f"prompt lengths: {min(lengths)} to {max(lengths)} tokens, {sum(lengths) / len(lengths):.1f} on average; at most {limit} "
        f"are allowed ({key})",
    ]
    warnings = []
    if cramped := sum(length + new > context for length in lengths):
        warnings.append(
            f"{cramped} of {len(lengths)} prompts leave less than policy.generation.max_new_tokens {new} for an answer, because prompt and "
            f"answer together have at most policy.max_total_sequence_length {context} tokens; raise it, or lower max_new_tokens"
        )
    if empty:
        warnings.append(
            f"{empty} of {len(lengths)} prompts ask nothing: their messages are empty; look at data.train's input_key"
        )
    if not prompts.generation_is_prompted:
        key, name = config.tokenizer
        warnings.append(
            f"the chat template of {name} ({key}) adds nothing where the answer is to begin (add_generation_prompt), so the policy may "
            "continue the question; give a template that does (policy.tokenizer.chat_template)"
        )
    remedy = "choose another model (policy.model_name), or other data"
    if unknown_tokens:
        share = unknown_tokens / sum(lengths)
        warnings.append(
            f"{share:.1%} of the prompts' tokens are {tokenizer.unk_token!r}, in place of text without a token; {remedy}"
        )
    if dropped := {c for c in characters if not c.isspace() and not tokenizer.encode(c, add_special_tokens=False)}:
        share = sum(characters[c] for c in dropped) / characters.total()
        warnings.append(
            f"{share:.1%} of the prompts' characters have no token, and the model never sees them "
            f"({', '.join(map(repr, sorted(dropped)[:10]))}); {remedy}"
        )
    return lines, warnings
