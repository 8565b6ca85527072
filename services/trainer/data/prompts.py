"""The prompts of a run: the order of its problems (law 5), and the groups made from them."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import random
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from fractions import Fraction
from itertools import accumulate
from typing import Any

import msgspec
import numpy as np
from jinja2 import TemplateError

from headrace.base.errors import ConfigError, Problems
from headrace.config import Config
from headrace.records.trajectory import Group, Lane, Message, Sampling, apply_template
from headrace.run.evaluation import validation_id
from headrace.run.prompt_counts import PromptCounts

from .faults import list_first
from .model_tokens import ModelTokens
from .problems import load_evaluated, load_problems
from .sources import Problem

log = logging.getLogger(__name__)


class Prompts:
    """The groups of a run: training prompts by their `order`, held-out prompts (or those of `data.evaluate`) by the version that they
    evaluate.

    In an evaluation, `left_out` has id, problem and reason of each prompt that is too long (`data.overlong_prompts: leave_out`).

    The constructor loads the data sets, which blocks. It raises what `ModelTokens.load` raises, and `ConfigError` for a prompt that is too
    long, unless such prompts are left out. Several threads may use it: a lock protects the tokenizer, which is not thread-safe.
    """

    def __init__(self, config: Config, tokenizer: Any, tokens: ModelTokens | None = None) -> None:
        """`tokens` are those of the run's model. By default its files are read."""
        self._config = config
        self._builder = GroupBuilder(config, tokenizer, tokens or ModelTokens.load(config, tokenizer))
        data = config.data
        dropped: Counter[str] = Counter()
        train: list[Problem] = []
        self.left_out: list[tuple[str, Problem, str]] = []
        if data.evaluate is None:
            train, validation = load_problems(data, dropped, config.env)
            asked = {"validation": validation}
        else:
            asked = load_evaluated(data, dropped, config.env)
            if data.overlong_prompts == "leave_out":
                self.left_out = [
                    (validation_id(0, name, problem.index), problem, reason)
                    for name, problems in asked.items()
                    for problem in problems
                    if (reason := self._builder.too_long(problem))
                ]
        keys = {name: "data.validation" if data.evaluate is None else f"data.evaluate.{name}" for name in asked}
        wrong = Problems()
        self._train = self._fitting(train, "data.train", wrong)
        held_out = [
            (name, fit) for name, problems in asked.items() for fit in self._fitting(problems, keys[name], wrong)
        ]
        wrong.tell()
        self._held_out = held_out if data.evaluate is not None else held_out[: config.algorithm.max_val_samples]
        tasks, validated = ({problem.task_name for _, problem in part} for part in (held_out, self._held_out))
        if data.evaluate is None:
            _check_named_metrics(config, validated)
        self._order = _make_order(self._train, config) if data.evaluate is None else ()
        self._lock = threading.Lock()
        self.counts = PromptCounts(
            train=len(self._train),
            validation=len(held_out),
            orders=len(self._order),
            digest=digest_problems(self._train, [problem for _, problem in held_out]),
            duplicates=dropped["duplicates"],
            duplicates_validation=dropped["duplicates_validation"],
            held_out=dropped["held_out"],
            too_long=len(train) - len(self._train),
            too_long_validation=sum(map(len, asked.values())) - len(held_out),
            unvalidated=tuple(sorted(tasks - validated)),
        )

    @property
    def total(self) -> int:
        """The number of training prompts in all epochs."""
        return len(self._order)

    @property
    def can_validate(self) -> bool:
        return bool(self._held_out)

    @property
    def generation_is_prompted(self) -> bool:
        """Whether the chat template marks where the answer begins."""
        return self._builder.generation_is_prompted

    def train(self, orders: Iterable[int]) -> list[Group]:
        with self._lock:
            places = ((order, *self._order[order]) for order in orders)
            return [self._builder.train_group(self._train[index], order, epoch) for order, epoch, index in places]

    def validation(self, version: int) -> list[Group]:
        with self._lock:
            return [
                self._builder.validation_group(problem, version, position, name)
                for position, (name, problem) in enumerate(self._held_out)
            ]

    def find(self, lane: Lane, order: int) -> tuple[Problem, int | None] | None:
        """Return the problem of the group that has this place in its lane, and its epoch; None if there is no such place. Validation has no
        epochs."""
        with self._lock:
            if lane == "validation":
                return (self._held_out[order][1], None) if order < len(self._held_out) else None
            if order >= len(self._order):
                return None
            epoch, index = self._order[order]
            return self._train[index], epoch

    def encode(self) -> Iterator[tuple[Problem, list[int]]]:
        """Yield every training problem, then every validation problem that is used, each with its token ids."""
        for problem in (*self._train, *(problem for _, problem in self._held_out)):
            yield problem, self._builder.encode(problem)

    def _fitting(self, problems: list[Problem], key: str, wrong: Problems) -> list[Problem]:
        """Return the problems of `key` that fit. Adds to `wrong` longer ones, unless they are left out and some remain; messages that the
        chat template refuses; and tokens that the model does not know."""
        # a template refuses no content, so one problem of all that differ in nothing else is enough; encoding all of them takes too long
        by_rest = {_without_content(problem): problem for problem in problems}
        refused = []
        for problem in problems if self._builder.knows_more_than_the_model else by_rest.values():
            try:
                self._builder.encode(problem)
            except ConfigError as error:
                refused.append(str(error))
        if refused:
            wrong.add("\n".join([refused[0], *list_first(refused[1:], len(refused) - 1)]))
            return []
        found = [(problem, self._builder.too_long(problem)) for problem in problems]
        fitting = [problem for problem, reason in found if reason is None]
        numbered = self._config.data.evaluate is None  # the sources of an evaluation have names
        reasons = [
            f"{key}[{problem.source}]: {reason}" if numbered else f"{key}: {reason}"
            for problem, reason in found
            if reason is not None
        ]
        if reasons and self._config.data.overlong_prompts == "refuse":
            more = f" ({len(reasons)} of its {len(problems)} prompts are too long)" if len(reasons) > 1 else ""
            remedy = "raise it, remove them from the data, or leave them out with data.overlong_prompts=leave_out"
            wrong.add("\n".join([f"{reasons[0]}{more}; {remedy}", *list_first(reasons[1:], len(reasons) - 1)]))
        elif reasons and not fitting:
            wrong.add(
                f"{key}: none of its {len(problems)} prompts fits; raise data.max_input_seq_length or "
                "policy.max_total_sequence_length"
            )
        elif reasons:
            log.warning("%s: %d of %d problems are left out: %s, …", key, len(reasons), len(problems), reasons[0])
        return fitting


def _check_named_metrics(config: Config, tasks: Set[str]) -> None:
    """Raise `ConfigError` for a metric that no validation on held-out prompts of these `tasks` will have. The run would never stop, or know
    no best checkpoint, and say nothing."""
    algorithm = config.algorithm
    stops, stop = f"{algorithm.name}.stop_at_validation_metric", algorithm.stop_at_validation_metric
    if stop is not None and not tasks:
        raise ConfigError(
            f"{stops} {stop}: the run has no held-out prompts; give data.validation, or leave the key out"
        )
    for key, name in ((stops, stop), ("checkpointing.metric_name", config.checkpointing.metric_name)):
        metric, _, task = (name or "").removeprefix("val:").partition("/")
        if task and metric == "accuracy" and (len(tasks) < 2 or task not in tasks):
            known = ["accuracy", *(f"accuracy/{each}" for each in sorted(tasks) if len(tasks) > 1)]
            raise ConfigError(
                f"{key} {name}: the held-out prompts have no task of that name, or no other; give one of {', '.join(known)}"
            )


def _without_content(problem: Problem) -> str:
    return str([{name: value for name, value in message.items() if name != "content"} for message in problem.messages])


def digest_problems(train: Iterable[Problem], held_out: Iterable[Problem]) -> str:
    """Return a digest of these problems in this order, whatever files they come from."""
    digest = hashlib.sha256()
    for part in (train, held_out):
        for problem in part:
            # not JSON: a data set of the Hugging Face Hub may have types that JSON lacks (bytes, dates)
            digest.update(msgspec.msgpack.encode((problem.messages, problem.extra_env_info, problem.env_name)))
        digest.update(b"\n")
    return digest.hexdigest()


class GroupBuilder:
    """Turns a problem into a group with the policy's tokenizer (a transformers one with a chat template): tokens, stop ids and sampling.

    Raises `ConfigError` if the tokenizer has no chat template, and for a prompt that is longer than
    `data.max_input_seq_length` or leaves no room in `policy.max_total_sequence_length`, or has a token that the model does not know.
    """

    def __init__(self, config: Config, tokenizer: Any, tokens: ModelTokens) -> None:
        if not tokenizer.chat_template:
            key, name = config.tokenizer
            raise ConfigError(
                f"{key} {name}: its tokenizer has no chat template; give policy.tokenizer.chat_template, or name a tokenizer with one in "
                "policy.tokenizer.name"
            )
        self._config = config
        self._tokenizer = tokenizer
        self._tokens = tokens
        generation = config.policy.generation
        self._sampling = Sampling(
            temperature=generation.temperature,
            max_new_tokens=generation.max_new_tokens,
            stop_token_ids=self._tokens.ends,
            stop_strings=tuple(generation.stop_strings),
            bad_words=tuple(generation.bad_words),
            top_k=generation.top_k,
            top_p=generation.top_p,
        )
        overrides: dict[str, Any] = {}
        if generation.val_temperature is not None:
            overrides["temperature"] = generation.val_temperature
        if generation.val_top_p is not None:
            overrides["top_p"] = generation.val_top_p
        if generation.val_top_k is not None:
            overrides["top_k"] = generation.val_top_k if generation.val_top_k > 0 else None
        self._val_sampling = msgspec.structs.replace(self._sampling, **overrides)

    def train_group(self, problem: Problem, order: int, epoch: int) -> Group:
        n = self._config.algorithm.num_generations_per_prompt
        return self._group(problem, f"e{epoch}-train-{problem.index}", "train", order, n, self._sampling)

    def validation_group(self, problem: Problem, version: int, position: int, data_set: str = "validation") -> Group:
        """Make the group that evaluates `version` on `problem` of `data_set`, at `position` of that validation."""
        n = self._config.algorithm.val_num_generations_per_prompt
        name = validation_id(version, data_set, problem.index)
        return self._group(problem, name, "validation", position, n, self._val_sampling)

    def too_long(self, problem: Problem) -> str | None:
        """Return why `problem` is too long for a group; None if it isn't."""
        # no text has more tokens than bytes, so most problems are known to fit without being tokenized
        context, limit = self._config.policy.max_total_sequence_length - 1, self._config.data.max_input_seq_length
        longest = context if limit is None else min(context, limit)
        if len(json.dumps(problem.messages).encode()) + self._overhead * len(problem.messages) <= longest:
            return None
        return self._too_long(problem, len(self.encode(problem)))

    def _group(self, problem: Problem, name: str, lane: Lane, order: int, n: int, sampling: Sampling) -> Group:
        ids = self.encode(problem)
        if too_long := self._too_long(problem, len(ids)):
            raise ConfigError(f"{too_long}; raise it, or leave the problem out")
        room = self._config.policy.max_total_sequence_length - len(ids)
        return Group(
            id=name,
            lane=lane,
            order=order,
            task_name=problem.task_name,
            env_name=problem.env_name,
            messages=problem.messages,
            prompt_token_ids=np.asarray(ids, dtype=np.int32),
            extra_env_info=problem.extra_env_info,
            dataset_index=problem.index,
            n=n,
            sampling=msgspec.structs.replace(sampling, max_new_tokens=min(sampling.max_new_tokens, room)),
        )

    def encode(self, problem: Problem) -> list[int]:
        """Return the token ids of the prompt. Raises `ConfigError` if the chat template refuses its messages (some templates allow no
        system prompt, others no two messages of one role in a row), and for a token that the model does not know."""
        try:
            ids = self._apply_template(problem.messages, add_generation_prompt=True)
        except (TemplateError, TypeError) as error:
            key, name = self._config.tokenizer
            roles = ", ".join(message["role"] for message in problem.messages)
            raise ConfigError(
                f"the chat template of {name} ({key}) refuses {_name_prompt(problem)}, with messages of {roles}: {error}; correct the "
                "data, policy.tokenizer.chat_template or policy.tokenizer.chat_template_kwargs, or choose another tokenizer"
            ) from error
        self._tokens.check(ids, self._tokenizer, _name_prompt(problem))
        return ids

    def _apply_template(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> list[int]:
        ids: list[int] = apply_template(
            self._tokenizer.apply_chat_template,
            messages,
            add_generation_prompt=add_generation_prompt,
            tokenize=True,
            return_dict=False,
            **self._config.policy.tokenizer.chat_template_kwargs,
        )
        return ids

    @functools.cached_property
    def knows_more_than_the_model(self) -> bool:
        """Whether the tokenizer has tokens that the model's embedding lacks, so that any prompt may have one."""
        return max(self._tokenizer.get_vocab().values()) >= self._tokens.vocabulary

    @property
    def generation_is_prompted(self) -> bool:
        """Whether the chat template adds something where the answer is to begin."""
        asked = ({"role": "user", "content": "."},)
        with_prompt, without = (self._apply_template(asked, add_generation_prompt=each) for each in (True, False))
        return with_prompt != without

    @functools.cached_property
    def _overhead(self) -> int:
        """An upper bound on the tokens that the template adds to a message."""
        return len(self.encode(Problem(0, ({"role": "user", "content": "."},), {}, "", "")))

    def _too_long(self, problem: Problem, length: int) -> str | None:
        """Return why a prompt of `length` tokens does not fit, or None if it does."""
        context, limit = self._config.policy.max_total_sequence_length, self._config.data.max_input_seq_length
        where = f"{_name_prompt(problem)} has {length} tokens"
        if limit is not None and length > limit:
            return f"{where}, more than data.max_input_seq_length {limit}"
        if length >= context:
            return f"{where}, and policy.max_total_sequence_length {context} leaves no room for a completion"
        return None


def _name_prompt(problem: Problem) -> str:
    """Name the prompt, and its row if it comes from a file."""
    row = "" if problem.row is None else f" ({problem.row[0]}:{problem.row[1]})"
    return f"the prompt of {problem.task_name} problem {problem.index}{row}"


class PromptOrder:
    """A sequence that maps the `order` of a prompt to (epoch, index of the problem). The order counts from 0 across epochs. Each epoch has
    every problem once.

    With `shuffle` every epoch has its own permutation, a function of only (`seed`, epoch, `count`, `name`). So a trainer that resumes at
    `order` k gets the prompts that an uninterrupted one would have got, whatever the number of epochs. Entries can be computed in any
    order.
    """

    def __init__(self, count: int, seed: int, shuffle: bool, epochs: int, name: str = "") -> None:
        self._count = count
        self._drawn_from = f"seed {seed}{name}"
        self._shuffle = shuffle
        self._epochs = epochs
        self._drawn: tuple[int, list[int]] | None = None

    def __len__(self) -> int:
        return self._count * self._epochs

    def __getitem__(self, order: int) -> tuple[int, int]:
        if not 0 <= order < len(self):
            raise IndexError(f"place {order} of {len(self)} prompts ({self._count} problems, {self._epochs} epochs)")
        epoch, place = divmod(order, self._count)
        return epoch, self._permutation(epoch)[place] if self._shuffle else place

    def _permutation(self, epoch: int) -> list[int]:
        if self._drawn is None or self._drawn[0] != epoch:
            indices = list(range(self._count))
            random.Random(f"prompts of epoch {epoch}, {self._drawn_from}").shuffle(indices)
            self._drawn = epoch, indices
        return self._drawn[1]


class RoundRobinOrder:
    """A sequence that maps the `order` of a prompt to (epoch of its data set, index of the problem), in identical rounds. `turns` has the
    data set of each prompt of a round.

    `counts` are the numbers of problems of the data sets. The index is into the concatenation of their lists. Every data set has its own
    order and epochs (`PromptOrder`), and starts again when it is used up. The sequence ends with the round in which the last data set
    completes all its `epochs`; the others are then repeated more often. As for one data set, an entry is a function of only `counts`,
    `turns`, `seed` and `shuffle`.
    """

    def __init__(self, counts: Sequence[int], turns: Sequence[int], seed: int, shuffle: bool, epochs: int) -> None:
        self._turns = turns
        self._starts = [0, *accumulate(counts)][:-1]
        self._each = [0] * len(counts)
        self._seats = list[int]()
        for number in turns:
            self._seats.append(self._each[number])
            self._each[number] += 1
        self._rounds = max(-(-count * epochs // each) for count, each in zip(counts, self._each, strict=True))
        self._orders = [
            PromptOrder(count, seed, shuffle, -(-self._rounds * each // count), f", data set {number}")
            for number, (count, each) in enumerate(zip(counts, self._each, strict=True))
        ]

    def __len__(self) -> int:
        return self._rounds * len(self._turns)

    def __getitem__(self, order: int) -> tuple[int, int]:
        if not 0 <= order < len(self):
            raise IndexError(f"place {order} of {len(self)} prompts ({len(self._orders)} data sets in turn)")
        rounds, seat = divmod(order, len(self._turns))
        number = self._turns[seat]
        epoch, index = self._orders[number][rounds * self._each[number] + self._seats[seat]]
        return epoch, self._starts[number] + index


def spread(shares: Sequence[int]) -> list[int]:
    """Return a round in which data set `i` has `shares[i]` turns, spread evenly: at every place it has had its share so far, to within
    one."""
    # of the data sets that may have their next turn now, take the one whose turn is due first (Tijdeman's rule for the chairman assignment)
    whole, had, turns = sum(shares), [0] * len(shares), list[int]()
    for place in range(whole):
        open_now = (n for n, share in enumerate(shares) if had[n] * whole < share * (place + 1))
        number = min(open_now, key=lambda n: (Fraction((had[n] + 1) * whole, shares[n]), n))
        had[number] += 1
        turns.append(number)
    return turns


def _make_order(train: Sequence[Problem], config: Config) -> PromptOrder | RoundRobinOrder:
    """Make the order of training prompts: over all problems at once, or from each data set in turn."""
    data, how = config.data, (config.algorithm.seed, config.data.shuffle, config.algorithm.max_num_epochs)
    if not data.use_multiple_dataloader and data.shares is None:
        return PromptOrder(len(train), *how)
    counts = [sum(problem.source == number for problem in train) for number in range(len(data.train))]
    if not all(counts):
        raise ConfigError(
            f"data.train[{counts.index(0)}] has no problem left to draw from (those of validation and of earlier data sets are "
            "removed); leave the data set out, or draw from all of them as one (no weight, and data.use_multiple_dataloader false)"
        )
    if data.shares is None:
        turns = [number for number in range(len(counts)) for _ in range(config.prompts_of_each_set)]
    else:
        turns = spread(data.shares)
    return RoundRobinOrder(counts, turns, *how)
