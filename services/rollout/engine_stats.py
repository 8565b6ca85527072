"""What the engine says of itself after each of its steps: the use of its KV cache, its queue, preemptions, prefix cache and tokens.

vLLM computes it once something listens. Its own listener fills some forty Prometheus metrics, among them histograms of each request and
token. This one keeps the few sums that a person or a finding needs.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.stats import IterationStats, SchedulerStats


@dataclasses.dataclass
class EngineStats:
    """The state after the engine's newest step, and sums since its start.

    `kv_cache_use` is the share of the KV cache's blocks that sequences hold. `running` and `waiting` count sequences; those that wait were
    admitted here and have no room in the engine. `preemptions` count how often a running sequence lost its blocks to others, so that it is
    computed again. `prefix_queries` are the tokens of prompts that were looked up in the prefix cache, `prefix_hits` those found."""

    kv_cache_use: float = 0.0
    running: int = 0
    waiting: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0

    @classmethod
    def of(cls, engine: AsyncLLM) -> EngineStats:
        """Return those of an engine that was started with `stat_logger`."""
        assert engine.logger_manager is not None
        return next(each.engine_stats for each in engine.logger_manager.stat_loggers if hasattr(each, "engine_stats"))

    def add(self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats | None) -> None:
        if scheduler_stats is not None:
            self.kv_cache_use = scheduler_stats.kv_cache_usage
            self.running = scheduler_stats.num_running_reqs
            self.waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
            self.prefix_queries += scheduler_stats.prefix_cache_stats.queries
            self.prefix_hits += scheduler_stats.prefix_cache_stats.hits
        if iteration_stats is not None:
            self.preemptions += iteration_stats.num_preempted_reqs
            self.prompt_tokens += iteration_stats.prompt_token_stats.computed
            self.generated_tokens += iteration_stats.num_generation_tokens


def stat_logger() -> type[Any]:
    """Return the class of vLLM's loggers that fills an `EngineStats`. It is a `PrometheusStatLogger`, because vLLM adds its own unless it
    is given one."""
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    class Recorder(PrometheusStatLogger):
        def __init__(self, vllm_config: Any, engine_indexes: list[int] | None = None) -> None:
            self.engine_stats = EngineStats()  # without the histograms of the base class

        def record(
            self,
            scheduler_stats: SchedulerStats | None,
            iteration_stats: IterationStats | None,
            mm_cache_stats: object = None,
            engine_idx: int = 0,
        ) -> None:
            self.engine_stats.add(scheduler_stats, iteration_stats)

        def _do_nothing(self, *_: Any, **__: Any) -> None:
            """Stand for what the base class counts in its metrics."""

        log_engine_initialized = record_sleep_state = record_admission_rejection = _do_nothing

    return Recorder
