"""What a step trains on: trajectories as the algorithms see them, with what the passes and estimators add to them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from headrace.trajectory import Float32, Score, Trajectory
from services.trainer.learning.tokens import Bool, Float64
from services.trainer.network.rows import TokenSequence


@dataclasses.dataclass(frozen=True)
class Experience:
    """One trajectory of a batch, on the rank that trains on it.

    `place` is its own place in the batch (groups one after the other), `group` its group's, and `name` what errors call it.
    Of each of its [T] policy tokens: `gen`, the behaviour policy's log-probability, `mask`, False where it is over age, and
    `behind`, how many versions the weights that sampled it are behind those of the step. `reward` and `components` are as the
    `environment` gave them; `multiplier` is its weight in the loss.
    """

    name: str
    group: int
    place: int
    tokens: TokenSequence
    gen: Float32
    mask: Bool
    behind: Float32
    reward: float
    components: Mapping[str, float]
    environment: str
    multiplier: float
    truncated: bool

    @property
    def counted(self) -> float:
        """Sum of the weights of its tokens: what it adds to T."""
        return float(np.count_nonzero(self.mask)) * self.multiplier


@dataclasses.dataclass(frozen=True)
class Trace:
    """What a step knew of each policy token [T] of one trajectory, for those who want to look at it.

    `start` are the trainer's log-probabilities at the start of the step, `ref` the reference policy's, `teacher` the teacher's; `values`
    and `returns` are the value model's and its targets. None: the configuration didn't ask for it. `reward` is scaled and shaped, and
    `multiplier` 0 where the trajectory left the loss.
    """

    experience: Experience
    reward: float
    multiplier: float
    advantages: Float64
    start: Float32 | None = None
    ref: Float32 | None = None
    teacher: Float32 | None = None
    values: Float32 | None = None
    returns: Float64 | None = None

    @property
    def mean_advantage(self) -> float:
        """Over its tokens, to the last bit where they all have the same; 0 without any."""
        if self.advantages.size == 0:
            return 0.0
        first = float(self.advantages[0])
        return first + float((self.advantages - first).mean())


def experience_of(
    trajectory: Trajectory, score: Score, *, group: int, place: int, step: int, max_age: int, multiplier: float
) -> Experience:
    """A scored trajectory at `step`. Tokens that are over `max_age` there don't count; under most age policies none is."""
    versions = np.zeros(trajectory.completion_token_ids.size, np.float32)
    for span in trajectory.spans:
        versions[span.start : span.end] = span.version
    own = trajectory.loss_mask != 0
    behind = (step - versions[own]).astype(np.float32)
    assert score.reward is not None
    return Experience(
        name=f"trajectory {trajectory.group_id!r}[{trajectory.index}]",
        group=group,
        place=place,
        tokens=TokenSequence(trajectory.prompt_token_ids, trajectory.completion_token_ids, trajectory.loss_mask),
        gen=trajectory.logprobs[own],
        mask=behind <= max_age,
        behind=behind,
        reward=score.reward,
        components=score.components,
        environment=score.environment,
        multiplier=multiplier,
        truncated=trajectory.finish_reason == "length",
    )


def problem_with(experience: Experience, vocabulary: int, longest: int) -> str | None:
    """Why it can't be trained on by a model of `vocabulary` ids in sequences of at most `longest` tokens, or None."""
    tokens = experience.tokens
    if tokens.prompt.size == 0 or tokens.completion.size == 0:
        return f"a prompt of {tokens.prompt.size} and a completion of {tokens.completion.size} tokens; each needs at least one"
    if tokens.policy.size != tokens.completion.size:
        return f"loss_mask has {tokens.policy.size} entries for {tokens.completion.size} completion tokens"
    for name in ("gen", "mask", "behind"):
        if getattr(experience, name).size != tokens.policy_tokens:
            return (
                f"{name} has {getattr(experience, name).size} entries for {tokens.policy_tokens} tokens of the policy"
            )
    if not np.isfinite(experience.gen).all():
        return "a behaviour log-probability is not finite"
    if not np.isfinite([experience.reward, *experience.components.values()]).all():
        return f"its reward is {experience.reward}, of {dict(experience.components)}"
    if not (np.isfinite(experience.multiplier) and experience.multiplier >= 0):
        return f"its loss multiplier is {experience.multiplier}"
    if tokens.length > longest:
        return f"{tokens.length} tokens, more than policy.max_total_sequence_length {longest}"
    for ids in (tokens.prompt, tokens.completion):
        if ids.min() < 0 or ids.max() >= vocabulary:
            return f"a token id outside the model's vocabulary of {vocabulary}"
    return None


def mini_batches(experiences: Sequence[Experience], size: int, whole: int) -> list[list[int]]:
    """Indices of this rank's share of each mini-batch: those of `whole` trajectories by their place, `size` after `size`, so
    that which trajectory is in which optimizer step depends on nothing but the batch."""
    count = -(-whole // size) or 1
    shares: list[list[int]] = [[] for _ in range(count)]
    for index, experience in enumerate(experiences):
        shares[experience.place // size].append(index)
    return shares
