"""A record of each kind, with every field."""

from __future__ import annotations

import msgspec
import numpy as np

from headrace.records.score import Score
from headrace.records.trajectory import Call, EpisodeTrajectory, Group, Sampling, Span, Trajectory

GROUP = Group(
    id="e0-train-7",
    lane="train",
    order=7,
    task_name="addition",
    env_name="adder",
    messages=({"role": "user", "content": "47+85"},),
    prompt_token_ids=np.array([1, 2, 3], np.int32),
    extra_env_info={"answer": "132", "nested": {"list": [1, 2.5, None, True]}},
    dataset_index=7,
    n=2,
    sampling=Sampling(temperature=1.0, max_new_tokens=6, stop_token_ids=(5,), stop_strings=("\n",), seed=3),
)
TRAJECTORY = Trajectory(
    group_id="e0-train-7",
    attempt=1,
    index=1,
    prompt_token_ids=np.array([1, 2, 3], np.int32),
    completion_token_ids=np.array([4, 5, 6, 7], np.int32),
    logprobs=np.array([-0.5, -1.0, 0.0, -2.0], np.float32),
    loss_mask=np.array([1, 1, 0, 1], np.uint8),
    spans=(Span(3, 0, 2), Span(4, 2, 4)),
    finish_reason="stop",
    text="132",
    replica="r1",
    turns=((0, 2), (3, 4)),
    timings={"generate": 0.25},
    writers=(("r0", 0, 3), ("r1", 3, 4)),
)
SCORE = Score(status="SCORED", reward=1.0, components={"exact": 1.0}, metadata={"said": "132"}, environment="adder")
CALL = Call(
    parent=-1,
    context_token_ids=np.array([1, 2, 3], np.int32),
    completion_token_ids=np.array([4, 5], np.int32),
    logprobs=np.array([-0.5, -1.0], np.float32),
    spans=(Span(3, 0, 1), Span(4, 1, 2)),
    finish_reason="stop",
    replica="r1",
    trained=True,
    messages=({"role": "user", "content": "47+85"},),
    answer={"role": "assistant", "content": "132", "tool_calls": [{"id": 1}]},
    timings={"sample": 0.25},
)
EPISODE = EpisodeTrajectory(
    group_id="e0-train-7",
    attempt=1,
    index=1,
    calls=(CALL, msgspec.structs.replace(CALL, parent=0, context_token_ids=np.array([9], np.int32), trained=False)),
    truncated=False,
    runner="runner-1",
    timings={"episode": 1.5},
)
