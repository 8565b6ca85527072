"""What a step computes once, before any weights move: rewards, log-probabilities, values, and from them advantages."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from headrace.config import Config
from headrace.errors import ServiceError
from headrace.trajectory import Float32
from services.trainer.learning.advantages import (
    Settings,
    Share,
    components_of,
    estimate,
    leave_out_truncated,
    mask_logprob_errors,
    needs,
    reward_metrics,
    scale_rewards,
    shape_rewards,
)
from services.trainer.learning.experience import Experience, Trace
from services.trainer.learning.tokens import Episode, Float64
from services.trainer.learning.world import World
from services.trainer.network.projection import Warp

# What a model says of each policy token of each of the rank's sequences; None where nothing asks for it.
PerToken = Sequence[Float32] | None


@dataclasses.dataclass(frozen=True)
class Passed:
    """Which forward-only passes a step makes. `unfiltered`: one for what top-k and top-p leave out, too, which KL terms compare."""

    start: bool
    unfiltered: bool
    ref: bool
    teacher: bool
    values: bool

    @classmethod
    def of(cls, config: Config, optimizer_steps: int) -> Passed:
        """`start` is spared where the one optimizer step's own pass gives it, and nothing asks for it earlier."""
        estimator = needs(Settings.of(config.algorithm), config.loss_fn)
        measured = config.algorithm.seq_logprob_error_threshold is not None
        distils = config.algorithm.adv_estimator.name == "opd"
        return cls(
            start=optimizer_steps > 1 or measured or estimator.start,
            unfiltered=estimator.start and Warp.of(config.policy.generation).filters,
            ref=(estimator.ref and not distils) or config.loss_fn.kl_in_loss,
            teacher=estimator.ref and distils,
            values=estimator.values,
        )


@dataclasses.dataclass(frozen=True)
class Known:
    """What those passes gave."""

    start: PerToken
    unfiltered: PerToken
    ref: PerToken
    teacher: PerToken
    values: PerToken


@dataclasses.dataclass(frozen=True)
class Rewards:
    """Of a batch, on every rank: `shaped` [B], and each component scaled, [B] by name (`gdpo` alone has any)."""

    shaped: Float64
    components: Mapping[str, Float64]
    metrics: Mapping[str, float]


def rewards_of(config: Config, experiences: Sequence[Experience], size: int, world: World) -> Rewards:
    """A collective: the rewards of a batch of `size`, scaled and shaped. Raises `ServiceError` for components that `gdpo` can't weigh."""
    algorithm = config.algorithm
    scaling, shaping = algorithm.reward_scaling, algorithm.reward_shaping
    scaled = scale_rewards(np.array([e.reward for e in experiences], dtype=np.float64), scaling)
    lengths = np.array([e.tokens.policy_tokens for e in experiences], dtype=np.intp)
    truncated = np.array([e.truncated for e in experiences], dtype=np.bool_)
    shaped = shape_rewards(scaled, lengths, truncated, shaping, config.max_response_length)
    share = Share(_episodes(experiences, shaped, {}, [e.multiplier for e in experiences]), size, world)
    table = share.whole(np.stack([scaled, shaped], axis=1))
    return Rewards(
        table[:, 1], _components(config, experiences, world), reward_metrics(table[:, 0], table[:, 1], shaping)
    )


def _components(config: Config, experiences: Sequence[Experience], world: World) -> Mapping[str, Float64]:
    grpo = config.grpo
    if grpo is None or grpo.adv_estimator.name != "gdpo":
        return {}
    own = [(e.place, dict(e.components), e.environment) for e in experiences]
    everyone = sorted((item for share in world.gather(own) for item in share), key=lambda item: item[0])
    scores, environments = [scores for _, scores, _ in everyone], [environment for *_, environment in everyone]
    return components_of(scores, environments, grpo.adv_estimator.reward_weights, grpo.reward_scaling)


def traces_of(
    config: Config,
    experiences: Sequence[Experience],
    rewards: Rewards,
    known: Known,
    world: World,
) -> tuple[list[Trace], dict[str, float]]:
    """A collective: what is known of each of the rank's trajectories before the first optimizer step, and metrics of the batch."""
    algorithm, size = config.algorithm, rewards.shaped.size
    start = known.start
    multipliers = leave_out_truncated(
        np.array([e.multiplier for e in experiences], dtype=np.float64),
        np.array([e.truncated for e in experiences], dtype=np.bool_),
        algorithm.overlong_filtering,
    )
    shaped = rewards.shaped[[e.place for e in experiences]]
    metrics = dict(rewards.metrics)
    if start is not None:
        # a token that top-k or top-p leaves out now says nothing of how well the two agree
        compared = [np.where(np.isneginf(s), e.gen, s) for s, e in zip(start, experiences, strict=True)]
        multipliers, found = mask_logprob_errors(
            algorithm.seq_logprob_error_threshold,
            _episodes(experiences, shaped, {"start": compared}, multipliers),
            [e.gen.astype(np.float64) for e in experiences],
            size,
            world,
        )
        metrics |= found
    compared_with = known.ref if known.teacher is None else known.teacher
    arrays = {"start": known.unfiltered or start, "ref": compared_with, "values": known.values}
    episodes = _episodes(experiences, shaped, arrays, multipliers)
    settings = Settings.of(algorithm)
    generations = algorithm.num_generations_per_prompt
    estimates = estimate(settings, config.loss_fn, episodes, rewards.shaped, rewards.components, generations, world)
    metrics |= estimates.metrics
    at = _at({"start": start, "ref": known.ref, "teacher": known.teacher, "values": known.values})
    traces = [
        Trace(
            experience=experience,
            reward=float(shaped[i]),
            multiplier=float(multipliers[i]),
            advantages=estimates.advantages[i],
            returns=None if estimates.returns is None else estimates.returns[i],
            **at(i),
        )
        for i, experience in enumerate(experiences)
    ]
    return traces, metrics


def _episodes(
    experiences: Sequence[Experience],
    shaped: Float64,
    arrays: Mapping[str, PerToken],
    multipliers: Sequence[float] | Float64,
) -> list[Episode]:
    at = _at(arrays)
    return [
        Episode(
            name=experience.name,
            group=experience.group,
            index=experience.place,
            length=experience.tokens.policy_tokens,
            reward=float(shaped[i]),
            components=experience.components,
            mask=experience.mask,
            multiplier=float(multipliers[i]),
            **{name: None if x is None else x.astype(np.float64) for name, x in at(i).items()},
        )
        for i, experience in enumerate(experiences)
    ]


def _at(arrays: Mapping[str, PerToken]) -> Callable[[int], dict[str, Float32 | None]]:
    return lambda i: {name: None if values is None else values[i] for name, values in arrays.items()}


def check_groups(size: int, generations: int) -> None:
    """Raise `ServiceError` for a batch that is not of whole groups."""
    if size == 0 or size % generations:
        raise ServiceError(
            f"a batch of {size} trajectories is not of groups of num_generations_per_prompt {generations} (law 3)"
        )
