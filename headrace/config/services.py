"""Sections of the pipeline itself: `run`, `replay`, `rollout`, `reward`, `trainer`, `page`, `weight_channel`, `checkpointing`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, PositiveInt, field_validator

from headrace.base.addresses import is_one_host, replace_wildcard, with_port
from headrace.config.marks import AnyPath, Fixed, MayChange
from headrace.config.section import Section


class RunConfig(Section):
    id: Fixed[str | None] = Field(
        None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
        description="name of the run; `up` with the id of an earlier run continues it; null: `up` makes one",
    )
    dir: MayChange[str] = Field(
        "runs", description="folder with one folder per run: logs, metrics, checkpoints, the buffer's files"
    )
    started_in: MayChange[str | None] = Field(
        None,
        description="the folder at which this file's relative paths start, relative to the file; `up` writes it into the run's config.yaml",
    )
    from_environment: Fixed[str | None] = Field(
        None,
        description="digest of the fixed keys that environment variables give, so that a change of one is noticed; `up` writes it "
        "into the run's config.yaml",
    )
    max_failed_share: MayChange[float] = Field(
        0.2,
        ge=0,
        le=1,
        description="once 100 prompts have ended, the run ends with an error if a larger share of its prompts has failed",
    )
    stop_on: MayChange[tuple[Literal["collapse", "equal_rewards", "train_inference"], ...]] = Field(
        (),
        description="alarms that stop the run, with a checkpoint and exit code 3",
    )
    hang_timeout_s: MayChange[float] = Field(
        120.0,
        gt=0,
        description="`headrace up` kills and restarts a service of its own that answers nothing for this many seconds",
    )


class ReplayConfig(Section):
    redis_url: MayChange[str | None] = Field(
        None,
        description="a Redis >= 7 or Valkey server: redis://host:port/0, rediss:// for TLS, sentinel://host:port,host:port/SERVICE, "
        "unix:///path; null: the replay service starts an embedded server",
    )
    redis_host: MayChange[str] = Field("127.0.0.1", description="host on which the embedded server listens")
    redis_port: MayChange[int] = Field(
        6390,
        ge=1,
        le=65535,
        description="port of the embedded server; `headrace up` chooses a free one unless this is given",
    )
    host: MayChange[str] = Field("127.0.0.1", description="host on which the HTTP API listens")
    port: MayChange[int] = Field(
        8390,
        ge=0,
        le=65535,
        description="port of the HTTP API; with 0, and under `headrace up` unless this is given, a free one is chosen",
    )
    appendfsync: MayChange[Literal["always", "everysec", "no"]] = Field(
        "everysec", description="durability of the embedded server's append-only file"
    )
    redundant_generations: Fixed[int] = Field(
        0, ge=0, description="trajectories started beyond n for each group; the first n scored complete it"
    )
    retain_steps: MayChange[int] = Field(
        0,
        ge=0,
        description="newest trained steps whose trajectories are kept after their checkpoint, for `headrace replay-step` and `rescore`",
    )
    bias_warning: MayChange[float | None] = Field(
        0.2,
        gt=0,
        description="warn if the mean length or reward of trained trajectories differs from that of all finished ones by more than this, "
        "relative to their standard deviation; null: never",
    )
    lease_s: MayChange[float] = Field(15.0, gt=0, description="seconds without renewal after which a lease expires")
    group_deadline_s: MayChange[float] = Field(
        600.0,
        gt=0,
        description="seconds without progress after which a group is taken from its replica or runner, regardless of heartbeats; it keeps "
        "what was generated. What counts as progress: docs/replay.md",
    )
    scoring_deadline_s: MayChange[float] = Field(
        120.0,
        gt=0,
        description="seconds without renewal after which a scorer's trajectories return to the queue; this costs no attempt",
    )
    max_attempts: MayChange[int] = Field(3, ge=1, description="attempts at a group before it fails")
    max_scoring_attempts: MayChange[int] = Field(
        3,
        ge=1,
        description="attempts at scoring a trajectory before its group fails; twice as many while its environment scores no other",
    )
    max_bytes: MayChange[int] = Field(
        4 * 1024**3,
        ge=1024**2,
        description="bytes of payloads in the buffer at which no new groups are leased, until there is room again",
    )


def _one_host(text: str) -> str:
    if not is_one_host(text):
        raise ValueError(
            f"{text!r} is not a host at which others reach this one; give a name or an address, without a port or http://"
        )
    return text


Reachable = Annotated[str, AfterValidator(_one_host)]


class RolloutConfig(Section):
    host: str = Field("127.0.0.1", description="host on which the HTTP API listens")
    port: int = Field(
        0, ge=0, le=65535, description="port of the HTTP API; 0 chooses a free one (`headrace status` shows it)"
    )
    advertise_host: Reachable | None = Field(
        None,
        description="name at which others reach this replica; null: host, or the machine's name where host is 0.0.0.0",
    )
    replicas: int = Field(1, ge=1, description="rollout processes that `headrace up` starts")
    max_concurrent_groups: int = Field(64, ge=1, description="groups that one replica holds at a time")
    weights_from: Literal["trainer", "store"] = Field(
        "trainer",
        description="where a replica gets its weights: trainer, by a broadcast; store, from the object store of checkpointing.store, for a "
        "replica that the trainer can't reach. The trainer doesn't wait for one that pulls (docs/operations.md, Replicas elsewhere)",
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: the GPU if vLLM sees one")
    num_threads: PositiveInt | Literal["auto"] = Field(
        "auto",
        description="CPU threads of the engine on a CPU; auto: OMP_NUM_THREADS, or else a quarter of the cores, at least one. More threads "
        "than free cores make it several times slower",
    )
    save_partial_tokens: int | None = Field(
        256,
        ge=1,
        description="an unfinished trajectory is saved in the buffer each time it has grown by this many tokens, so that another "
        "replica can continue it; null: only when a replica leaves",
    )
    load_deadline_s: float = Field(
        1800.0,
        gt=0,
        description="while a replica loads its engine on a GPU, trainer.fleet_deadline_s is suspended, for this many seconds at most",
    )
    heartbeat_s: float = Field(2.0, gt=0, description="seconds between a replica's renewals of itself and its leases")
    dead_after_s: float = Field(10.0, gt=0, description="seconds of silence after which a replica is DEAD")
    quarantine_after: int | None = Field(
        3,
        ge=1,
        description="a replica is left out until it is restarted once it has failed this many refits in a row, or its log-probabilities "
        "have stood apart from the trainer's (logger.train_inference_alarm.token_mult_prob_error) in this many steps in a row while the "
        "others' have not; null: never",
    )
    engine_timeout_s: float = Field(
        120.0,
        gt=0,
        description="seconds without an answer of its engine after which a replica ends, to be restarted",
    )


class RewardConfig(Section):
    host: str = Field("127.0.0.1", description="host on which the gRPC hub listens")
    port: int = Field(
        50390,
        ge=0,
        le=65535,
        description="port of the hub; with 0, and under `headrace up` unless this is given, a free one is chosen",
    )
    http_port: int = Field(0, ge=0, le=65535, description="port of health, readiness and metrics; 0 chooses a free one")
    address: str | list[str] | None = Field(
        None,
        description="host:port at which the replay service reaches the hub, or a list of several hubs that share the work; null: host:port",
    )
    max_message_bytes: int = Field(64 * 1024**2, ge=1024)
    workers: int = Field(2, ge=1, description="processes that run built-in environments")

    @field_validator("address")
    @classmethod
    def _names_a_hub(cls, value: str | list[str] | None) -> str | list[str] | None:
        if value == []:
            raise ValueError("the list is empty; name a hub, or give null for host:port")
        return value

    @property
    def addresses(self) -> list[str]:
        """The addresses of the hubs."""
        if self.address is None:
            return [with_port(replace_wildcard(self.host), self.port)]
        return [self.address] if isinstance(self.address, str) else self.address


class TrainerConfig(Section):
    host: str = Field("127.0.0.1", description="host on which health, readiness and metrics are served")
    port: int = Field(0, ge=0, le=65535)
    num_processes: int = Field(1, ge=1, description="ranks that `headrace up` starts under torchrun")
    device: Literal["auto", "cpu", "cuda"] = "auto"
    gpu_memory_fraction: float | None = Field(
        None,
        gt=0,
        le=1,
        description="share of its GPU's memory that a rank may use; null: all, or half where `headrace up` shares the GPU with a replica, "
        "or what it needs if that is more",
    )
    num_threads: PositiveInt | Literal["auto"] | None = Field(
        "auto",
        description="CPU threads of a rank; auto: OMP_NUM_THREADS, or else, on a CPU, the cores that generation leaves; null: torch's "
        "choice",
    )
    shard_within_host: bool = Field(
        False,
        description="on several hosts: each host holds a copy of the models, sharded over its ranks, and hosts exchange only gradients, "
        "once per optimizer step. Faster on a slow network, if a host's GPUs have enough memory (`headrace plan memory`); false shards "
        "over all ranks",
    )
    reduce_gradients: Literal["auto", "step", "micro_batch"] = Field(
        "auto",
        description="with several ranks: how often gradients are summed over them. `step` sends least, but holds a float32 gradient of the "
        "whole model on each rank; auto: step where that takes at most an eighth of a GPU's memory, and on a CPU",
    )
    fleet_deadline_s: float = Field(
        300.0, gt=0, description="seconds without a verified replica after which the run ends with that reason"
    )
    validation_deadline_s: float = Field(
        300.0,
        gt=0,
        description="seconds for which a refit, or the end of the run, waits for a running validation; none waits for one that runs beside "
        "training (validation_replicas), but the end of the run",
    )
    validation_replicas: int = Field(
        0,
        ge=0,
        description="replicas that validate beside training: they keep the version to be measured until all of its held-out prompts are "
        "evaluated, and the others go on to the next ones (at least one does). 0: all replicas validate, and the next refit waits",
    )
    collective_timeout_s: float = Field(
        1800.0,
        gt=0,
        le=1e9,  # 31 years; torch and threads take no more seconds than ten times that
        description="seconds without progress after which a rank ends, naming the rank that it waits for; with one rank, its /healthz "
        "turns red. Must be more than fleet_deadline_s, weight_channel.timeout_s, and the time of a micro-batch or of writing a model to "
        "disk",
    )


class PageConfig(Section):
    host: MayChange[str] = Field("127.0.0.1", description="host on which the page of runs listens")
    port: MayChange[int | None] = Field(
        8396,
        ge=0,
        le=65535,
        description="port of the page of runs; with 0, and under `headrace up` unless this is given, a free one is chosen; null: `headrace "
        "up` starts no page",
    )


class WeightChannelConfig(Section):
    backend: Literal["auto", "gloo", "nccl"] = Field(
        "auto",
        description="auto: nccl where the trainer and the replicas run on GPUs and it connects them, else gloo (docs/gpu.md)",
    )
    host: Reachable | None = Field(
        None,
        description="address of the trainer that replicas can reach; null: the address of its interface to the buffer's server",
    )
    port: int = Field(0, ge=0, le=65535, description="rendezvous port on the trainer; 0 chooses a free one")
    timeout_s: float = Field(
        60.0,
        gt=0,
        description="deadline in seconds of acknowledgement, of the transfer and of verification, each; nccl has half of it to connect",
    )
    bucket_bytes: int | None = Field(
        None,
        ge=1024,
        description="weights are broadcast in flat buckets of whole layers, of at most this size; null: 256 MiB from a trainer on a GPU, "
        "32 MiB on a CPU",
    )
    verify_tolerance: float | None = Field(
        None,
        gt=0,
        description="largest |log-probability difference| on the probe between trainer and replica with which a refit is verified; null: "
        "1e-3 where both compute in float32, else 4 times what rounding to bfloat16 changes, at most 2 (docs/architecture.md, The probe)",
    )
    verify_mean_tolerance: float | None = Field(
        None,
        gt=0,
        description="the same for its mean; null: verify_tolerance where both compute in float32, else 4 times what rounding changes, at "
        "most 0.2",
    )
    max_retries: int = Field(
        3, ge=0, description="repeated broadcasts of one version after a member was lost during the transfer"
    )

    @property
    def connect_s(self) -> float:
        """How long the members of a group may take to connect once all have come, before another way to connect is tried: so that there is
        time for all of them before `trainer.fleet_deadline_s`."""
        return self.timeout_s / 2

    def bucket_size(self, device: str) -> int:
        """Return `bucket_bytes`, or what null means for a trainer on this kind of device."""
        return self.bucket_bytes or (256 if device == "cuda" else 32) * 2**20


# Without what an address may have after its path: it would not be in the names of objects.
STORE_URL = r"^((s3|s3a|gs|az|abfs|abfss)://[^/?#]+|file:///)[^?#]*$"


class CheckpointingConfig(Section):
    enabled: MayChange[bool] = True
    checkpoint_dir: MayChange[AnyPath[str | None]] = Field(None, description="null: <run folder>/checkpoints")
    store: MayChange[str | None] = Field(
        None,
        pattern=STORE_URL,
        description="object store to which checkpoints are copied during training, and from which a machine without the run's folder "
        "continues: s3://BUCKET/PREFIX, gs://…, az://…, file:///FOLDER; null: none",
    )
    snapshot_dir: MayChange[AnyPath[str | None]] = Field(
        None,
        description="folder of each of the trainer's hosts, in memory (/dev/shm), for a snapshot of each step between the checkpoints, "
        "from which the trainer continues after one of its processes died; null: none",
    )
    save_period: MayChange[int] = Field(
        10, ge=1, description="steps between checkpoints; the steps since the last one are trained again after a crash"
    )
    checkpoint_must_save_by: MayChange[str | None] = Field(
        None,
        pattern=r"^\d+:[0-2]\d:[0-5]\d:[0-5]\d$",
        description="time since the trainer's start, DD:HH:MM:SS, by which one more checkpoint is saved, for jobs with a time limit; "
        "the run continues",
    )
    keep_top_k: MayChange[int | None] = Field(
        3,
        ge=1,
        description="the number of checkpoints to keep, the best by metric_name; null keeps all. The newest is always kept",
    )
    metric_name: MayChange[str | None] = Field(
        "val:accuracy", pattern=r"^(val|train):.+$", description="null keeps the newest"
    )
    higher_is_better: MayChange[bool] = Field(True, description="of metric_name; without effect where that is null")
    save_optimizer: Fixed[bool] = True

    @property
    def must_save_by_s(self) -> float | None:
        """`checkpoint_must_save_by` in seconds."""
        if self.checkpoint_must_save_by is None:
            return None
        days, hours, minutes, seconds = map(int, self.checkpoint_must_save_by.split(":"))
        return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
