"""A key that an error names as its remedy may change when the run goes on, unless the error can only come before anything is trained."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from headrace.config.compare import Change
from headrace.config.explain import known_keys, pattern

ROOT = Path(__file__).parents[3]
KEY = re.compile(r"\b[a-z_]+(?:\.[a-z_*]+)+\b")
# What a start refuses before the first step, or names without asking for a change of it; `run.id` asks for a new run.
BEFORE_THE_FIRST_STEP = {
    # every prompt is read, and judged, before the run begins
    "services/trainer/data/problems.py": {"data.train", "data.default.env_name"},
    "services/trainer/data/prompts.py": {
        "data.train",
        "data.use_multiple_dataloader",
        "data.validation",
        "policy.tokenizer.name",
        "policy.tokenizer.chat_template",
        "policy.tokenizer.chat_template_kwargs",
    },
    # no replica was verified with the initial weights; and what the model's configuration says, before that
    "services/trainer/control/fleet.py": {"policy.hf_config_overrides", "policy.precision"},
    "services/trainer/network/policy_model.py": {"policy.max_total_sequence_length", "policy.model_name"},
    "services/trainer/data/model_tokens.py": {
        "policy.generation.bad_words",
        "policy.generation.max_new_tokens",
        "policy.generation.stop_token_ids",
        "policy.model_name",
    },
    # what is evaluated or exported, and no run goes on
    "headrace/cli/evaluate.py": {"data.default"},
    "headrace/cli/weights.py": {"policy.model_name"},
    # the model is loaded, and its first refit proved
    "services/trainer/network/adapter.py": {
        "policy.lora_cfg",
        "policy.lora_cfg.enabled",
        "policy.lora_cfg.exclude_modules",
    },
    "services/refit/proof.py": {"policy.lora_cfg.exclude_modules"},
    "services/trainer/network/backbone.py": {"policy.hf_config_overrides", "policy.max_total_sequence_length"},
    # of another run: a new one, from these weights
    "services/trainer/control/resume.py": {"data.train", "data.validation", "policy.model_name"},
    # a checkpoint is tried before the first step
    "services/trainer/learning/learner.py": {"policy.model_name"},
}


def raised(path: Path) -> Iterator[str]:
    """The text of each error that the module raises, without its values."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Raise):
            constants = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant)]
            yield "".join(value for value in constants if isinstance(value, str))


def test_the_remedies_that_errors_name_are_accepted() -> None:
    modules = [
        path for folder in ("services", "headrace/replay", "headrace/cli") for path in (ROOT / folder).rglob("*.py")
    ]
    named = {
        str(path.relative_to(ROOT)): {key for text in raised(path) for key in KEY.findall(text)} - {"run.id"}
        for path in modules
    }
    known = {
        name: {key for key in keys if pattern(tuple(key.split("."))) in known_keys()} for name, keys in named.items()
    }
    fixed = {name: {key for key in keys if not Change(key, None, None).allowed} for name, keys in known.items()}
    assert {name: keys for name, keys in fixed.items() if keys} == BEFORE_THE_FIRST_STEP
    free = set().union(*known.values()) - set().union(*fixed.values())
    assert "checkpointing.checkpoint_dir" in free, "they are found"
