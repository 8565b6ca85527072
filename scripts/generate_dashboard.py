"""Generate Grafana's dashboard from the table below: `python scripts/generate_dashboard.py [OUTPUT]`.

The output is committed, and a test checks that it is current.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

OUTPUT = Path(__file__).resolve().parent.parent / "deploy" / "observability" / "grafana" / "headrace.json"
WIDTH, HEIGHT = 8, 7  # of a panel, on Grafana's grid of 24 columns

_EFFICIENCY = "headrace_trainer_efficiency"


class Panel(NamedTuple):
    """A chart: its title, the unit that Grafana shows, and each series' legend and expression."""

    title: str
    unit: str
    series: dict[str, str]
    stacked: bool = False


ROWS: dict[str, list[Panel]] = {
    "The run": [
        Panel("Reward, and mean reward held out", "none",
              {"trained": "headrace_trainer_reward", "held out": "headrace_trainer_validation_accuracy"}),
        Panel("Age of a batch", "none",
              {"mean": "headrace_trainer_avg_trajectory_age", "largest": "headrace_trainer_max_trajectory_age"}),
        Panel("Steps", "none", {"trained": "headrace_trainer_step"}),
        Panel("Time of a step", "percent", {
            "training": f"{_EFFICIENCY}_efficiency_pct",
            "no batch was ready": f"{_EFFICIENCY}_idle_buffer_starvation_pct",
            "weights were sent": f"{_EFFICIENCY}_idle_refit_bubble_pct",
            "validation": f"{_EFFICIENCY}_idle_validation_pct",
            "checkpoint": f"{_EFFICIENCY}_overhead_checkpoint_pct",
            "the rest": f"{_EFFICIENCY}_overhead_upkeep_pct",
        }, stacked=True),
        Panel("Duration of a step", "s", {"step": "headrace_trainer_timing_train_total_step_time"}),
        Panel("Throughput", "none", {"tokens a second": "headrace_trainer_performance_tokens_per_sec"}),
    ],
    "The policy's health": [
        Panel("Entropy", "none", {"nats": "headrace_trainer_entropy"}),
        Panel("Gradient", "none", {"norm before clipping": "headrace_trainer_grad_norm"}),
        Panel("Shares of completions and tokens", "percentunit", {
            "completions cut off": "headrace_trainer_truncation_rate",
            "tokens repeated": "headrace_trainer_repetition",
            "tokens off-policy": "headrace_trainer_off_policy_tokens",
            "groups without spread": "headrace_trainer_groups_without_spread",
        }),
        Panel("Trainer against inference", "none", {"error of probabilities": "headrace_trainer_token_mult_prob_error"}),
        Panel("KL to the reference policy", "none", {"nats": "headrace_trainer_kl_penalty"}),
        Panel("Length of completions", "none", {
            "mean": "headrace_trainer_mean_gen_tokens_per_sample",
            "longest": "headrace_trainer_max_gen_tokens_per_sample",
        }),
    ],
    "The buffer": [
        Panel("Training groups by state", "none", {"{{state}}": 'headrace_replay_groups{lane="train"}'}),
        Panel("Scoring", "none", {
            "waiting": "headrace_replay_scoring_waiting",
            "being scored": "headrace_replay_scoring_taken",
        }),
        Panel("Memory", "bytes", {"held": "headrace_replay_bytes", "limit": "headrace_replay_max_bytes"}),
        Panel("Groups generated again, by cause", "ops", {"{{cause}}": "rate(headrace_replay_requeues_total[1m])"}),
        Panel("Refused calls, by code", "ops", {"{{code}}": "rate(headrace_replay_refusals_total[1m])"}),
        Panel("Trajectories, by moment", "ops", {"{{moment}}": "rate(headrace_replay_trajectories_total[1m])"}),
    ],
    "Replicas": [
        Panel("Tokens of trajectories", "none", {"{{instance}}": "rate(headrace_rollout_tokens_total[1m])"}),
        Panel("Sequences in the engine", "none", {"{{instance}}": "headrace_rollout_requests_running"}),
        Panel("KV cache in use", "percentunit", {"{{instance}}": "headrace_rollout_kv_cache_use"}),
        Panel("Sequences in the engine's steps", "none", {
            "{{instance}} computed": "headrace_rollout_engine_running",
            "{{instance}} waiting": "headrace_rollout_engine_waiting",
        }),
        Panel("Tokens sampled", "none", {"{{instance}}": "rate(headrace_rollout_engine_generated_tokens_total[1m])"}),
        Panel("Preemptions", "ops", {"{{instance}}": "rate(headrace_rollout_preemptions_total[1m])"}),
        Panel("Hits in the prefix cache", "percentunit", {
            "{{instance}}": "rate(headrace_rollout_prefix_cache_hits_total[1m]) "
            "/ rate(headrace_rollout_prefix_cache_queries_total[1m])",
        }),
        Panel("Verified weights", "none", {"{{instance}}": "headrace_rollout_weight_version"}),
        Panel(
            "Replicas by state, and as many as are wanted",
            "none",
            {"{{state}}": "headrace_replay_replicas", "wanted": "headrace_replay_replicas_wanted"},
        ),
        Panel("Refits, by outcome", "ops", {"{{outcome}}": "sum by (outcome) (rate(headrace_rollout_refits_total[5m]))"}),
        Panel("Difference to the trainer on the probe", "none", {"{{instance}}": "headrace_rollout_weight_difference"}),
    ],
    "Environments": [
        Panel("Scores, by environment and status", "ops", {
            "{{environment}} {{status}}": "sum by (environment, status) (rate(headrace_scores_total[1m]))",
        }),
        Panel("Time in an environment", "s", {
            f"{{{{environment}}}} p{share}": f"histogram_quantile(0.{share}, sum by (environment, le) "
            "(rate(headrace_scoring_environment_seconds_bucket[5m])))"
            for share in (50, 99)
        }),
        Panel("Wait for an environment", "s", {
            f"{{{{environment}}}} p{share}": f"histogram_quantile(0.{share}, sum by (environment, le) "
            "(rate(headrace_scoring_waiting_seconds_bucket[5m])))"
            for share in (50, 99)
        }),
    ],
    "Episodes": [
        Panel("Episodes, by outcome", "ops", {
            "{{environment}} {{outcome}}": "sum by (environment, outcome) (rate(headrace_agents_episodes_total[1m]))",
        }),
        Panel("Running episodes", "none", {"{{instance}}": "headrace_agents_episodes_open"}),
        Panel("Time of a call, by phase, p99", "s", {
            "{{phase}}": "histogram_quantile(0.99, sum by (phase, le) (rate(headrace_agents_phase_seconds_bucket[5m])))",
        }),
    ],
}  # fmt: skip


def dashboard() -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in ROWS.items():
        panels.append({"type": "row", "title": title, "collapsed": False, "gridPos": _place(top, 0, 24, 1)})
        top += 1
        for number, panel in enumerate(row):
            column = number % (24 // WIDTH)
            if number and not column:
                top += HEIGHT
            panels.append(_draw(panel, _place(top, column * WIDTH, WIDTH, HEIGHT)))
        top += HEIGHT
    return {
        "uid": "headrace",
        "title": "Headrace",
        "editable": False,
        "refresh": "5s",
        "time": {"from": "now-1h", "to": "now"},
        "schemaVersion": 39,
        "panels": [{"id": number, **panel} for number, panel in enumerate(panels, start=1)],
    }


def _draw(panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    custom = {"showPoints": "never", "fillOpacity": 60 if panel.stacked else 0}
    if panel.stacked:
        custom["stacking"] = {"mode": "normal"}
    source = {"type": "prometheus", "uid": "prometheus"}
    return {
        "type": "timeseries",
        "title": panel.title,
        "datasource": source,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": custom}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + number), "datasource": source, "expr": expression, "legendFormat": legend}
            for number, (legend, expression) in enumerate(panel.series.items())
        ],
    }


def _place(top: int, left: int, width: int, height: int) -> dict[str, int]:
    return {"x": left, "y": top, "w": width, "h": height}


if __name__ == "__main__":
    output = Path(sys.argv[1]) if len(sys.argv) > 1 else OUTPUT
    output.write_text(json.dumps(dashboard(), indent=1) + "\n", encoding="utf-8")
