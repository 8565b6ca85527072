"""What the API of the page answers: its OpenAPI description, and its encoding. Numbers that are not finite are null. Times are Unix
seconds."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Best(Answer):
    metric: str = Field(description="its name, as `checkpointing.metric_name` has it: `val:accuracy`")
    step: int = Field(description="the version that was evaluated, or the step that trained")
    value: float | None = Field(description="the value of the metric")


class Spark(Answer):
    metric: str = Field(description="the metric of the curve; empty if the run can't be read")
    points: list[tuple[int, float | None]] = Field(
        description="at most 60 points, each a step and a value", max_length=60
    )


class Run(Answer):
    id: str = Field(description="the name of the run's folder")
    state: Literal["running", "finished", "stopped", "failed", "killed", "unknown"] = Field(
        description="the run's state"
    )
    reason: str = Field(description="why it failed; empty otherwise")
    started: float | None = Field(description="when it was first started")
    since: float | None = Field(description="since when it has been in its state")
    step: int | None = Field(description="the number of steps trained; null before the first")
    max_steps: int | None = Field(description="the number of steps planned")
    seconds_per_step: float | None = Field(description="median time of the newest steps")
    eta_s: float | None = Field(description="seconds until the planned steps are trained, if the run is up")
    best: Best | None = Field(description="its best value of the metric that chooses checkpoints")
    spark: Spark = Field(description="a small curve of the metric that `best` is of")
    collapse: str | None = Field(description="that its policy has collapsed, since when, and why; null if it hasn't")
    error: str | None = Field(description="why the run can't be read; the other fields are then empty")
    environments: list[str] = Field(description="the names of its environments")
    model: str = Field(description="policy.model_name")
    algorithm: Literal["grpo", "ppo"] | None = Field(description="the algorithm; null if the run can't be read")


class Runs(Answer):
    folder: str = Field(description="the folder that is served")
    runs: list[Run] = Field(description="its runs, those that were started last first")


class Newest(Answer):
    step: int = Field(description="the step, or the version that was evaluated")
    time: float = Field(description="when it ended")
    metrics: dict[str, float | None] = Field(description="all of its metrics, by name")


class NewestOfKinds(Answer):
    train: Newest | None = Field(description="the newest training step")
    validation: Newest | None = Field(description="the newest validation")


class Flow(Answer):
    counts: dict[str, int] = Field(description="training groups by state")
    per_s: dict[str, float] = Field(
        description="groups that enter a state each second, by state, over the steps of the window; empty if unknown"
    )


class TimePart(Answer):
    name: str = Field(description="the part of a step")
    metric: str = Field(description="the metric with its seconds")
    seconds: float | None = Field(description="its mean over the window")
    share: float | None = Field(description="its share of the time")


class Time(Answer):
    parts: list[TimePart] = Field(
        description="the parts of a step, which add up to its time; without the first after a start, unless it is the only one"
    )
    steps: dict[str, list[float | None]] = Field(description="`step`, and the seconds of each part at these steps")


class Evidence(Answer):
    view: Literal["metrics", "prompts", "group", "timeline", "system"] = Field(description="the view that shows it")
    query: dict[str, Any] = Field(description="the query parameters of that view")


class Finding(Answer):
    title: str = Field(description="what is amiss")
    remedy: str = Field(description="what to do about it, as key=value or in words")
    share: float | None = Field(description="its share of the time, if it costs time")
    severity: Literal["info", "warning", "error"] = Field(description="how grave it is")
    evidence: Evidence = Field(description="where to see it")


class Alarm(Answer):
    step: int = Field(description="the step that raised it")
    name: str = Field(description="which alarm it is; the metric is NAME_alarm")
    text: str = Field(description="what it says")
    evidence: Evidence = Field(description="where to see it")


class Checkpoint(Answer):
    step: int = Field(description="the version of its weights")
    kept: bool = Field(description="whether it is there to resume from")
    metric: float | None = Field(description="its value of checkpointing.metric_name, if it has one")
    best: bool = Field(description="whether it is the run's best")


class Overview(Answer):
    run: Run = Field(description="the run's row in the list")
    now: dict[str, Any] | None = Field(
        description="the content of now.json, the run's state at its `time`; null without it"
    )
    newest: NewestOfKinds = Field(description="the newest metrics")
    flow: Flow = Field(description="groups by state, and how fast they flow")
    time: Time = Field(description="where the time of a step goes")
    findings: list[Finding] = Field(description="what is amiss, the gravest first")
    alarms: list[Alarm] = Field(description="the newest alarms, the newest last")
    checkpoints: list[Checkpoint] = Field(description="the published checkpoints, oldest first")
    window: Literal["last", "10", "all"] = Field(description="the steps over which shares are computed")
    problems: list[str] = Field(description="what could not be read, and damaged checkpoints; the rest was read")


class MetricName(Answer):
    kind: Literal["train", "validation"] = Field(description="the kind of lines that have it")
    name: str = Field(description="its name in the journal")
    section: str = Field(description="its section in docs/metrics.md")
    help: str = Field(description="what it means")
    unit: str = Field(description="its unit")
    empty: bool = Field(description="whether none of its values is finite")


class Mark(Answer):
    step: int = Field(description="the step at which it happened")
    kind: Literal["build", "rewind", "configuration", "collapse"] = Field(description="what happened")
    text: str = Field(description="what happened, in words")


class Metrics(Answer):
    names: list[MetricName] = Field(description="the metrics that the run has")
    marks: list[Mark] = Field(description="what happened to the run")
    steps: tuple[int, int] | None = Field(description="the first and the last step")
    problems: list[str] = Field(description="what could not be read; the rest was")


class Curve(Answer):
    metric: str = Field(description="KIND:NAME, as it was asked for")
    steps: list[int] = Field(description="the last step of each bucket")
    values: list[float | None] = Field(description="the mean of its finite values; null without any")
    low: list[float | None] = Field(description="the least of them")
    high: list[float | None] = Field(description="the greatest of them")
    missing: int = Field(description="how many values were not finite")


class Series(Answer):
    series: list[Curve] = Field(description="a curve for each metric that was asked for")


class Source(Answer):
    file: str = Field(description="the file of the data set")
    line: int = Field(description="the line, from 1; of a JSON list or a Parquet file the item or row, from 0")


class Group(Answer):
    id: str = Field(description="its id")
    lane: Literal["train", "validation"] = Field(description="whether it is trained, or evaluates")
    order: int = Field(description="its place in the order of prompts")
    epoch: int | None = Field(description="the pass over the data")
    task: str = Field(description="its task")
    environment: str = Field(description="the environment that scores it")
    n: int = Field(description="how many trajectories it has")
    prompt: str = Field(description="the first 300 characters of its prompt; of one group, the whole prompt")
    source: Source | None = Field(description="where its prompt is in the data set")
    state: str = Field(description="its newest state")
    reason: str = Field(description="why it ended so")
    step: int | None = Field(description="the step that trained it, or the version that it evaluated")
    timeline: str | None = Field(description="the start of the trainer that trained it")
    attempts: int = Field(description="attempts so far")
    replicas: list[str] = Field(description="the replicas that generated it")
    build: str | None = Field(description="the build of the environment that scored it")
    rewards: list[float | None] = Field(description="by trajectory; null where there is none")
    mean: float | None = Field(description="the mean reward")
    spread: float | None = Field(description="the standard deviation of the rewards")
    tokens: list[int | None] = Field(description="tokens of each trajectory's completion")
    oldest_version: int | None = Field(description="the version of the oldest weights that wrote a token")
    newest_version: int | None = Field(description="that of the newest")
    age: int | None = Field(description="the step less the oldest version")
    enqueued: float = Field(description="when it was queued")
    ended: float | None = Field(description="when it ended")


class Groups(Answer):
    total: int = Field(description="how many groups were found")
    groups: list[Group] = Field(description="those of this part of the list")
    states: dict[str, int] = Field(description="groups by state, with all other filters")
    lost_events: int = Field(description="events that were cut off before the trainer could write them")
    problems: list[str] = Field(description="what could not be read; the rest was")


class Event(Answer):
    time: float = Field(description="when it happened")
    what: str = Field(description="what happened, in one word")
    text: str = Field(description="what happened, in words")
    index: int | None = Field(description="to which trajectory")
    replica: str | None = Field(description="at which replica")
    step: int | None = Field(description="for which step")
    attempt: int | None = Field(description="at which attempt")
    reward: float | None = Field(description="with which reward")
    build: str | None = Field(description="by which build of the environment")
    reason: str | None = Field(description="why")


class Trajectory(Answer):
    index: int = Field(description="its index in the group")
    attempt: int | None = Field(description="the attempt that made it")
    replica: str | None = Field(description="the replica that pushed it")
    reward: float | None = Field(description="the environment's reward")
    advantage: float | None = Field(description="its advantage, once trained")
    components: dict[str, float | None] = Field(description="the parts of its reward")
    status: str = Field(description="the status of its score, or DROPPED; empty while it has none")
    message: str = Field(description="the environment's message, or why it was dropped")
    traceback: str = Field(description="the environment's traceback, of a completion that it could not score")
    tokens: int | None = Field(description="tokens of its completion")
    finish_reason: str | None = Field(description="why its completion ended")
    versions: list[tuple[int, int, int]] = Field(description="version, start and end of each range of tokens")
    kept: bool = Field(description="whether its sample is kept, with its text and tokens")
    content: str | None = Field(description="its text; null if it is not kept")
    metadata: dict[str, Any] = Field(description="what the environment added to its score")
    calls: int = Field(description="calls of an episode; 0 for a single completion")


class GroupStory(Group):
    messages: list[dict[str, Any]] | None = Field(description="the messages of its prompt; null if they are not kept")
    expected: str | None = Field(description="the expected answer")
    previous: str | None = Field(description="the group before it, by order")
    next: str | None = Field(description="the group after it")
    story: list[Event] = Field(description="what happened to it, oldest first")
    trajectories: list[Trajectory] = Field(description="its trajectories, by index")
    unkept: str | None = Field(description="why the text of none of them is kept; null if there is any")
    problems: list[str] = Field(description="what could not be read; the rest was")


class Token(Answer):
    id: int = Field(description="its id")
    text: str | None = Field(description="its text; null in files of older builds")


class Call(Answer):
    number: int = Field(description="its number in the episode, from 0")
    parent: int = Field(description="the call that it continues; -1 for none")
    start: int = Field(description="the first of its tokens in the completion")
    end: int = Field(description="the place after its last token")
    trained: bool = Field(description="whether its tokens are trained")
    finish_reason: str = Field(description="why it ended")
    replica: str = Field(description="the replica that answered it")
    messages: list[Any] = Field(description="its messages")
    answer: Any = Field(description="the policy's answer, a message")
    context_tokens: list[Token] = Field(description="the tokens of its context")
    timings: dict[str, Any] = Field(description="its times in seconds, by name")


class Tokens(Answer):
    group: str = Field(description="the id of its group")
    index: int = Field(description="its index in the group")
    step: int | None = Field(description="the step that trained it, or the version that it evaluated")
    total: int = Field(description="tokens of the whole completion")
    first: int = Field(description="the place of the first token of this part")
    tokens: list[Token] = Field(description="the tokens of this part")
    columns: dict[str, list[float | None]] = Field(
        description="numbers by token, of this part; docs/metrics.md defines them"
    )
    legend: dict[str, dict[str, str]] = Field(description="by column: the names of its codes")
    versions: list[tuple[int, int, int]] = Field(description="version, start and end of each range of tokens")
    calls: list[Call] = Field(description="the calls of an episode; none for a single completion")
    prompt_tokens: list[Token] = Field(description="the tokens of the prompt")
    reward: float | None = Field(description="the environment's reward")
    components: dict[str, float | None] = Field(description="the parts of its reward")
    metadata: dict[str, Any] = Field(description="what the environment added to its score")
    artifacts: dict[str, Any] = Field(description="what an episode's program left")


class Bar(Answer):
    start: float = Field(description="when it began")
    end: float = Field(description="when it ended")
    what: str = Field(description="what it is; of merged ones, what most of their time is")
    version: int | None = Field(description="of which weights")
    step: int | None = Field(description="of which step")
    group: str | None = Field(description="of which group")
    index: int | None = Field(description="of which trajectory")
    text: str = Field(description="what it is, in words")
    count: int = Field(1, description="how many bars it stands for")


class Lane(Answer):
    name: str = Field(description="the replica, the environment, or `trainer`")
    kind: Literal["replica", "trainer", "environment"] = Field(description="whose lane it is")
    bars: list[Bar] = Field(description="at most 2,000 bars; they may overlap", max_length=2000)
    merged: bool = Field(description="whether short bars were merged")


class Timeline(Answer):
    first: float = Field(description="where it begins")
    last: float = Field(description="where it ends")
    running: bool = Field(description="whether the run is at work, so that more will follow")
    lanes: list[Lane] = Field(description="a lane for each that worked")
    problems: list[str] = Field(description="what could not be read, or is not known")


class Key(Answer):
    key: str = Field(description="the key, with dots")
    value: Any = Field(description="its value, without passwords")
    origin: Literal["default", "file", "override", "environment"] = Field(description="what gave it, at the last start")
    file: str = Field(
        description="where it was given: the file and line, the command line, or the environment; empty for a default"
    )


class Log(Answer):
    name: str = Field(description="the name of the file")
    bytes: int = Field(description="its size")


class Git(Answer):
    commit: str = Field(description="the commit that was checked out")
    dirty: bool = Field(description="whether files differed from it")


class System(Answer):
    command: str = Field(description="the command that started it; of an older build, the one that continues it")
    continues: str = Field(description="the command that continues it")
    versions: dict[str, str] = Field(description="versions of packages at its start; empty if they were not recorded")
    git: Git | None = Field(
        description="the state of the repository that it was started in; null if it was not recorded"
    )
    started_in: str | None = Field(description="where it was started, from its folder")
    config: list[Key] = Field(description="its configuration, key by key")
    logs: list[Log] = Field(description="the logs of its services")


class LogLine(Answer):
    time: float = Field(description="when it was logged, by this machine's time zone")
    service: str = Field(description="which service logged it")
    level: str = Field(description="its level")
    text: str = Field(description="the record, with the lines that belong to it")


class Logs(Answer):
    lines: list[LogLine] = Field(description="the newest last")
    more: bool = Field(description="whether there are older ones")


class Difference(Answer):
    key: str = Field(description="the key in which configurations differ")
    values: list[Any] = Field(description="its value in each run")


class Comparison(Answer):
    runs: list[Run] = Field(description="the runs, as they were asked for")
    differences: list[Difference] = Field(description="where their configurations differ")


class View(Answer):
    path: str = Field(description="the address of a view, as /runs/NAME/metrics?metric=train:reward", max_length=2000)


class Shown(Answer):
    pages: int = Field(description="pages that were told")


def encode(answer: Any) -> bytes:
    """Return an answer as JSON. What is no UTF-8 in texts is replaced; numbers that are not finite are null."""
    try:
        return msgspec.json.encode(answer)
    except UnicodeEncodeError:
        return msgspec.json.encode(_mend(msgspec.to_builtins(answer)))


def _mend(value: Any) -> Any:
    match value:
        case str():
            return value.encode(errors="backslashreplace").decode()
        case dict():
            return {_mend(key): _mend(inner) for key, inner in value.items()}
        case list() | tuple():
            return [_mend(inner) for inner in value]
    return value
