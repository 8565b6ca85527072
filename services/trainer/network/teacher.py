"""The teacher of on-policy distillation (`opd`): a frozen model that says how likely it finds what the policy wrote."""

from __future__ import annotations

from typing import Any

from headrace.config import Config
from headrace.errors import ServiceError
from services.trainer.network.policy import Policy, tokenizer_of

KEY = "grpo.adv_estimator.teacher_model_name"


def teacher_name(config: Config) -> str | None:
    """Directory or name of the run's teacher; None where the estimator has none."""
    return config.grpo.adv_estimator.teacher_model_name if config.grpo else None


def load_teacher(config: Config, vocabulary: int, tokenizer: Any) -> Policy:
    """The run's teacher, for a policy of `vocabulary` token ids and this `tokenizer`; sharded as the policy is.

    Raises `ServiceError` if it can't be loaded, or token ids mean something else to it than to the policy. Its embedding may be
    longer than the policy's: those of one family are often padded differently.
    """
    name = teacher_name(config)
    assert name is not None
    teacher = Policy(config, trainable=False, other=(KEY, name))
    policy = config.policy.tokenizer.name or config.policy.model_name
    remedy = "choose a teacher of the policy's family"
    if teacher.vocab_size < vocabulary:
        raise ServiceError(
            f"{KEY} {name!r} has a vocabulary of {teacher.vocab_size}, the policy {config.policy.model_name!r} one of {vocabulary}: "
            f"it can't read all that the policy may write; {remedy}"
        )
    if difference := _difference(tokenizer_of(KEY, name).get_vocab(), tokenizer.get_vocab()):
        raise ServiceError(
            f"the tokenizers of {KEY} {name!r} and of the policy, {policy!r}, differ: {difference}; {remedy}"
        )
    return teacher


def _difference(theirs: dict[str, int], ours: dict[str, int]) -> str | None:
    """The first token that has not the same id in both."""
    token = min(
        (token for token in {**theirs, **ours} if theirs.get(token) != ours.get(token)),
        key=lambda token: (ours.get(token, len(ours)), theirs.get(token, len(theirs))),
        default=None,
    )
    if token is None:
        return None
    return f"{token!r} is {theirs.get(token, 'no token')} there and {ours.get(token, 'no token')} here"
