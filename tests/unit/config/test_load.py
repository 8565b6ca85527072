"""Precedence, and every way a configuration is refused: one line with the key, the value and the remedy."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args
from unittest import mock

import pytest
from pydantic import ValidationError

from headrace.base.errors import ConfigError
from headrace.config import Config, load, yaml_text
from headrace.config.data import DataSourceConfig
from headrace.config.explain import known_keys, nearest, pattern
from headrace.config.loading import InvalidConfig, examine
from headrace.config.other_names import NAMES
from headrace.config.section import Section
from headrace.config.yaml_text import dump, parse
from tests.support.configurations import refusal

BASE = """
run: {id: test}
grpo:
  num_prompts_per_step: 4
  num_generations_per_prompt: 8
policy:
  optimizer: {kwargs: {lr: 1e-4}}
data:
  train:
    - {dataset_name: arithmetic, env_name: adder, size: 10}
    - {dataset_name: arithmetic, env_name: adder, size: 20}
env:
  adder: {type: math}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(BASE)
    return path


# -- precedence --------------------------------------------------------------------------------------------------------


def test_command_line_over_environment_over_file_over_defaults(file: Path) -> None:
    key, variable = "grpo.num_prompts_per_step", {"HEADRACE_GRPO__NUM_PROMPTS_PER_STEP": "6"}
    assert load(file, environ={}).algorithm.num_prompts_per_step == 4
    assert load(file, environ=variable).algorithm.num_prompts_per_step == 6
    assert load(file, [f"{key}=8"], variable).algorithm.num_prompts_per_step == 8
    assert load(file, environ={}).algorithm.seed == Config().algorithm.seed


def test_sources_are_merged_key_by_key(file: Path) -> None:
    config = load(
        file, ["policy.optimizer.kwargs.eps=1e-6"], {"HEADRACE_POLICY__OPTIMIZER__KWARGS__WEIGHT_DECAY": "0.5"}
    )
    kwargs = config.policy.optimizer.kwargs
    assert (kwargs.lr, kwargs.eps, kwargs.weight_decay) == (1e-4, 1e-6, 0.5)


def test_the_last_override_of_a_key_wins(file: Path) -> None:
    assert load(file, ["grpo.seed=1", "grpo.seed=2"], {}).algorithm.seed == 2


@pytest.mark.parametrize(
    ("value", "expected"), [("null", None), ("2.5", 2.5), ("1e1", 10.0)], ids=["null", "number", "exponent"]
)
def test_values_are_yaml_in_arguments_and_plain_in_variables(file: Path, value: str, expected: float | None) -> None:
    assert load(file, [f"loss_fn.kl_input_clamp_value={value}"], {}).loss_fn.kl_input_clamp_value == expected
    assert load(file, [], {"HEADRACE_LOSS_FN__KL_INPUT_CLAMP_VALUE": value}).loss_fn.kl_input_clamp_value == expected


def test_lists_and_mappings_can_be_given_whole(file: Path) -> None:
    assert load(file, ["policy.optimizer.kwargs.betas=[0.8, 0.9]"], {}).policy.optimizer.kwargs.betas == (0.8, 0.9)
    environ = {"HEADRACE_POLICY__OPTIMIZER__KWARGS__BETAS": "[0.8, 0.9]"}
    assert load(file, [], environ).policy.optimizer.kwargs.betas == (0.8, 0.9)
    assert load(file, ["env.other={type: math}"], {}).env.keys() == {"adder", "other"}


def test_an_item_of_a_list_is_named_by_its_place(file: Path) -> None:
    assert [source.size for source in load(file, ["data.train.1.size=7"], {}).data.train] == [10, 7]


def test_text_stays_text_where_text_is_wanted(file: Path) -> None:
    assert load(file, ["run.id='007'"], {}).run.id == "007"
    assert load(file, ["run.id=2026-01-02"], {}).run.id == "2026-01-02"  # not a date
    assert load(file, [], {"HEADRACE_RUN__ID": "007"}).run.id == "007"


def test_other_variables_are_left_alone(file: Path) -> None:
    assert load(file, [], {"HF_TOKEN": "secret", "GRPO__SEED": "3"}).algorithm.seed == Config().algorithm.seed


def test_an_empty_section_is_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "sparse.yaml"
    path.write_text("{}")
    assert load(path, [], {}) == Config()
    path.write_text("grpo:\n  # num_prompts_per_step: 8\n")
    assert load(path, [], {}) == Config()


@pytest.mark.parametrize("text", ["", "# grpo: {}\n", "---\n"])
def test_an_empty_file_is_refused_as_a_run_s_own_and_as_a_base(tmp_path: Path, text: str) -> None:
    path = tmp_path / "empty.yaml"
    path.write_text(text)
    assert f"{path}: empty; write sections" in refusal(path)
    above = tmp_path / "above.yaml"
    above.write_text("defaults: empty.yaml")
    assert f"{path}: empty (defaults of {above}" in refusal(above)


def test_what_show_prints_loads_as_the_same_configuration(file: Path, tmp_path: Path) -> None:
    config = load(file, ["run.id='1e5'", "data.train.0.system_prompt='2026-01-02'"], {})
    again = tmp_path / "again.yaml"
    again.write_text(dump(config))
    assert load(again, [], {}) == config


# -- unknown keys ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "near"),
    [
        ("grpo.num_prompt_per_step=8", "did you mean grpo.num_prompts_per_step?"),
        ("policy.optimizer.kwargs.colour=8", "has betas, eps, foreach, fused, lr, weight_decay"),
        ("grpo.max_trajectory_age_steps=3", "did you mean grpo.async_grpo.max_trajectory_age_steps?"),
        ("grpoo.seed=3", "did you mean grpo?"),
        ("env.adder.typ=math", "did you mean env.adder.type?"),
        ("data.train.1.siz=3", "did you mean data.train.1.size?"),
        ("cluster.num_nodes=3", "the top level has"),
    ],
)
def test_an_unknown_key_names_itself_and_the_nearest(file: Path, override: str, near: str) -> None:
    message = refusal(file, override)
    assert "unknown key" in message
    assert near in message
    assert "command line" in message


def test_an_unknown_key_shows_its_value(file: Path) -> None:
    assert "value 8" in refusal(file, "grpo.num_prompt_per_step=8")
    file.write_text(BASE + "loss_fn: {ratio_clip_mim: 0.1}\n")
    assert f"loss_fn.ratio_clip_mim: unknown key, value 0.1 ({file}:14)" in refusal(file)
    assert "loss_fn.ratio_clip_min?" in refusal(file)


@pytest.mark.parametrize(
    ("variable", "near"),
    [
        ("HEADRACE_GRPO__NUM_PROMPTS_PER_STEPS", "grpo.num_prompts_per_step"),
        ("HEADRACE_GRP__SEED", "HEADRACE_GRPO__SEED"),
        ("HEADRACE_GRPO_SEED", "HEADRACE_"),
        ("HEADRACE_ZZZZ", "the section does not exist"),
    ],
)
def test_an_unknown_variable_is_an_error_too(file: Path, variable: str, near: str) -> None:
    message = refusal(file, environ={variable: "a-token"})
    assert "a-token" not in message
    assert near in message


def test_all_wrong_variables_and_overrides_are_said_at_once(file: Path) -> None:
    variables = refusal(file, environ={"HEADRACE_GRP__SEED": "1", "HEADRACE_ZZZZ": "2"})
    assert [line.partition(":")[0] for line in variables.splitlines()] == ["HEADRACE_GRP__SEED", "HEADRACE_ZZZZ"]
    overrides = refusal(file, "seed", "data.train.7.size=3", "grpo.seed=5", "=4")
    assert [line.partition(" ")[0] for line in overrides.splitlines()] == ["'seed'", "data.train.7.size=3:", "'=4'"]


def test_the_rest_of_a_wrong_configuration_is_kept(file: Path) -> None:
    with pytest.raises(InvalidConfig) as refused:
        examine(
            file, ["grpo.sed=3", "env.more.type=nothing", "env.odd={}", "policy.precision=float3", "grpo.seed=7"], {}
        )
    rest = refused.value.rest
    assert rest is not None
    assert rest.config.algorithm.seed == 7
    assert "more" not in rest.config.env
    assert refused.value.sections == {"grpo", "env", "policy"}
    with pytest.raises(InvalidConfig) as refused:  # what is wrong is no single value
        examine(file, ["rollout.weights_from=store"], {})
    assert refused.value.rest is None


def test_all_contradictions_of_sections_are_said_with_places(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "grpo: {num_generations_per_prompt: 3}\n"
        "policy:\n  train_global_batch_size: 5\n"
        "data:\n  train: {dataset_name: arithmetic,\n    env_name: adder}\n"
        "  validation:\n    - dataset_name: arithmetic\n"
        "env:\n  a-b.c: {type: math, timeout_s: 20}\n"
        "rollout:\n  dead_after_s: 300\n"
    )
    found = refusal(file, "grpo.num_prompts_per_step=4", "replay.scoring_deadline_s=10").splitlines()
    assert [(line.partition(" ")[0], line.rpartition(" (")[2]) for line in found] == [
        ("policy.train_global_batch_size", f"{file}:3)"),  # the first of three keys
        ("replay.lease_s", f"{file}:12)"),  # what it contradicts was given
        ("data.train.env_name:", f"{file}:6)"),
        ("data.validation.0.env_name:", f"{file}:8)"),  # it lacks the key
        ("env.a-b.c.timeout_s", f"{file}:10)"),
    ]


def test_a_mistake_in_data_default_is_said_once(file: Path) -> None:
    assert refusal(file, "data.default.siz=3").splitlines() == [
        "data.default.siz: unknown key, value 3 (command line); did you mean data.default.size?"
    ]


# -- wrong types and combinations --------------------------------------------------------------------------------------


def sections(annotation: Any) -> Iterator[type[Section]]:
    """The sections that a value of this type has in it, at any depth."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
        for field in annotation.model_fields.values():
            yield from sections(field.annotation)
    for part in get_args(annotation):
        yield from sections(part)


def takes_infinity(section: type[Section], key: str) -> bool:
    try:
        section.model_validate({key: math.inf})
    except ValidationError as error:
        return not any(each["loc"][:1] == (key,) for each in error.errors())
    return True


def test_only_a_limit_that_may_be_off_can_be_infinite() -> None:
    """No deadline, above all: a hang would last for ever."""
    found = {
        f"{section.__name__}.{key}"
        for section in set(sections(Config))
        for key in section.model_fields
        if takes_infinity(section, key)
    }
    assert found == {"LossConfig.ratio_clip_max", "PolicyConfig.max_grad_norm", "ValueConfig.max_grad_norm"}


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("grpo.seed=many", "grpo.seed: 'many' should be a valid integer (command line); the default is 42"),
        ("replay.port=99999", "replay.port: 99999 "),
        ("run.id=7", "run.id: 7 "),
        ("data.default.task_config=null", "data.default.task_config: null "),
        ("grpo=7", "grpo: 7 is not a section"),
        ("loss_fn.prev_logprobs_source=magic", "should be 'recompute' or 'generation'"),
        ("run.id='../up'", "run.id: '../up' string should match pattern"),
        ("grpo.num_generations_per_prompt=1", "grpo.num_generations_per_prompt 1 with grpo.adv_estimator.name grpo"),
        ("grpo.stop_at_validation_metric=accuracy", "stop_at_validation_threshold null"),
        ("checkpointing.checkpoint_must_save_by=1h", "checkpointing.checkpoint_must_save_by: '1h' string should match pattern"),
        ("env.adder.timeout_s=121", "env.adder.timeout_s 121 is more than replay.scoring_deadline_s 120"),
        ('env={"my env": {type: math}, adder: {type: math}}', "letters, digits and ._-"),
        ("data.num_prompts_per_dataloader=2", "data.num_prompts_per_dataloader 2 with data.use_multiple_dataloader false"),
        ("data.train.0.env_name=nobody", "data.train.0.env_name: 'nobody' is not one of"),
        ("trainer.collective_timeout_s=.inf", "trainer.collective_timeout_s: .inf "),
        ("rollout.dead_after_s=.inf", "rollout.dead_after_s: .inf should be a finite number"),
        ("env.adder.timeout_s=.nan", "env.adder.timeout_s: .nan should be a finite number"),
        ("env.other={}", "env.other: give `type`"),
        ("data.train.0.data_path=x", "data.train.0: dataset_name 'arithmetic' and data_path 'x'"),
    ],
)  # fmt: skip
def test_a_value_that_cant_be_is_one_line_with_key_value_and_remedy(file: Path, override: str, said: str) -> None:
    message = refusal(file, override)
    assert said in message
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize(
    ("source", "unread"),
    [
        ("dataset_name: arithmetic, info_keys: [a], input_key: q, output_key: a, processor: m.f", 4),
        ("dataset_name: reasoning_gym, task: chain_sum, input_key: q, split: test, subset: a", 3),
        ("dataset_name: arithmetic, task: chain_sum", 1),
        ("dataset_name: gsm8k, input_key: q, output_key: a, task_config: {digits: 2}", 3),
        ("dataset_name: gsm8k, input_key: q, output_key: a, info_keys: [a], split: test, processor: m.f", 0),
        ("dataset_name: m.f, size: 9, split: test, task: a", 3),
        ("dataset_name: m.f, input_key: q, task_config: {digits: 2}", 0),
        ("data_path: a.jsonl, size: 9, task: a, task_config: {digits: 2}", 3),
        ("data_path: owner/name, input_key: q, split: test, subset: a, weight: 2, split_validation_size: 0.1", 0),
    ],
)
def test_keys_that_a_kind_of_data_set_does_not_read_are_refused(file: Path, source: str, unread: int) -> None:
    override = f"data.train={{{source}, env_name: adder}}"
    if unread:
        lines = refusal(file, override).splitlines()
        assert len(lines) == unread
        assert all(
            " has no effect on " in line and "; leave it out, or set it to its default, " in line for line in lines
        )
    else:
        load(file, [override], {})
    load(
        file,
        [f"data.default={{{source}}}", "data.train={dataset_name: arithmetic, data_path: null, env_name: adder}"],
        {},
    )


@pytest.mark.parametrize("part", ["validation", "evaluate.mine"])
def test_only_training_has_weights_and_is_split(file: Path, part: str) -> None:
    override = f"data.{part}={{data_path: a.jsonl, weight: 2, split_validation_size: 0.1, env_name: adder}}"
    weight, split = refusal(file, override).splitlines()
    assert f"data.{part}" in weight
    assert ".weight: 2.0 has no effect" in weight
    assert ".split_validation_size: 0.1 has no effect" in split


def test_a_key_that_a_data_set_does_not_read_is_shown_where_it_stands(file: Path) -> None:
    file.write_text(BASE.replace("size: 20", "size: 20, input_key: question"))
    assert refusal(file).endswith(f"'input' ({file}:11)")


def test_what_a_run_saved_without_effect_is_read(tmp_path: Path) -> None:
    """Earlier versions took it."""
    saved = tmp_path / "x" / "config.yaml"
    saved.parent.mkdir()
    data = (
        "num_prompts_per_dataloader: 2, train: [{data_path: a.jsonl, size: 9, env_name: e}], "
        "evaluate: {mine: {dataset_name: gsm8k, input_key: q, env_name: e}}"
    )
    saved.write_text(f"run: {{id: x, dir: {tmp_path}, started_in: ..}}\nenv: {{e: {{type: math}}}}\ndata: {{{data}}}\n")
    assert load(saved, environ={}).data.train[0].size == DataSourceConfig().size


@pytest.mark.parametrize(
    "override",
    [
        "grpo.reward_scaling.target_max=1e308",
        "grpo.reward_scaling.source_min=-1e308",
        "grpo.reward_shaping.overlong_buffer_penalty=1e308",
        "grpo.adv_estimator={name: gdpo, reward_weights: [1e308]}",
        "env.both={type: combine, parts: {adder: 1e308}}",
    ],
)
def test_what_multiplies_rewards_is_bounded_as_they_are(file: Path, override: str) -> None:
    message = refusal(file, override)
    assert len(message.splitlines()) == 1, message
    assert "1000000000" in message


def test_the_deadline_of_a_checkpoint_is_days_to_seconds(file: Path) -> None:
    config = load(file, ["checkpointing.checkpoint_must_save_by='01:03:30:05'"], {})
    assert config.checkpointing.must_save_by_s == ((24 + 3) * 60 + 30) * 60 + 5
    assert load(file, [], {}).checkpointing.must_save_by_s is None


@pytest.mark.parametrize("unknown", ["polcy.x=1", "grpo.sed=1", "data.validation={siz: 3, env_name: adder}"])
def test_an_unknown_key_does_not_hide_what_sections_contradict(file: Path, unknown: str) -> None:
    contradictions = "env.adder.timeout_s=121", "data.train.0.env_name=nobody"
    first, *others = refusal(file, unknown, *contradictions).splitlines()
    assert "unknown key" in first
    assert others == refusal(file, *contradictions).splitlines()


def test_every_problem_is_named_at_once(file: Path) -> None:
    assert len(refusal(file, "grpo.seed=many", "replay.port=-1", "polcy.x=1").splitlines()) == 3


def test_the_variable_at_fault_is_said_to_be_one(file: Path) -> None:
    assert "grpo.seed: 'x' should be a valid integer (environment)" in refusal(
        file, environ={"HEADRACE_GRPO__SEED": "x"}
    )


# -- the file and the overrides themselves -----------------------------------------------------------------------------


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none.yaml").startswith(f"{tmp_path / 'none.yaml'}: can't read the configuration")
    assert "can't read" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("grpo:\n  seed: 1\n  - 2\n", "line 3: not valid YAML"),
        ("grpo:\n  seed: 1\n  seed: 2\n", "line 3: not valid YAML: the key 'seed' is given twice"),
        ("grpo: [1\n", "not valid YAML"),
        ("- 1\n", "a list, not a mapping"),
        ("1: {}\n", "line 1: not valid YAML: the key 1 "),
        ("grpo:\n  true: 3\n", "line 2: not valid YAML: the key true "),
        ("grpo:\n  null: 4\n", "line 2: not valid YAML: the key null "),
        ("grpo:\n  on: 4\n", "line 2: not valid YAML: the key on "),
        ("policy: {hf_config_overrides: {\n1: 2}}", "line 2: not valid YAML: the key 1 is not text"),
        ("grpo:\n\tseed: 1\n", "line 2: not valid YAML: found character"),
        ("run: {}\n---\nrun: {}\n", "line 2: not valid YAML: but found another document"),
        ("run: *a\n", "line 1: not valid YAML: found undefined alias 'a'"),
        ("grpo: [1\n", "close the bracket"),
        ("run: 'a\n", "close the quote or bracket"),
        ("just text\n", "text, not a mapping; write sections"),
        ("7\n", "a number, not a mapping; write sections"),
        ("run: !!python/object:os.system {}\n", "not valid YAML"),
        ("run: {id: \x00}\n", "not valid YAML"),
        ("policy:\n  model_name: {{ MODEL }}\n", "line 2: not valid YAML: a key is a mapping"),
        ("run:\n  ? [a]\n  : b\n", "line 2: not valid YAML: a key is a list"),
        ("grpo:\n  seed: !!int abc\n", "line 2: not valid YAML: 'abc' is not a valid int"),
        ("grpo:\n  seed: !!int ''\n", "line 2: not valid YAML: '' is not a valid int"),
        ("grpo:\n  seed: !!bool abc\n", "line 2: not valid YAML: 'abc' is not a valid bool"),
        ("grpo:\n  seed: !!float abc\n", "line 2: not valid YAML: 'abc' is not a valid float"),
        (f"grpo:\n  seed: {'9' * 6000}\n", f"line 2: not valid YAML: '{'9' * 57}…'"),
        ("run:\n  id: !!timestamp 2021-13-45\n", "line 2: not valid YAML: could not determine a constructor"),
        ("run:\n  id: !!set {a}\n  dir: ${run.id}\n", "line 2: not valid YAML: could not determine a constructor"),
    ],
)
def test_broken_yaml_names_the_line(file: Path, text: str, said: str) -> None:
    file.write_text(text)
    message = refusal(file)
    assert message.startswith(str(file))
    assert said in message


BOMB = "run: {id: &a0 x}\n" + "".join(f"x{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))
MERGED = "x0: &m0 {a: 1}\n" + "".join(f"x{n}: &m{n} {{<<: [{', '.join([f'*m{n - 1}'] * 9)}]}}\n" for n in range(1, 12))
CHAIN = "x0: &c0 []\n" + "".join(f"x{n}: &c{n} [*c{n - 1}]\n" for n in range(1, 400))
TEN_LEVELS = [f"${{x{n}}}" for n in range(10)]
INTO_TEXT = "x0: ten letters\n" + "".join(f"x{n + 1}: '{text * 10}'\n" for n, text in enumerate(TEN_LEVELS))
INTO_LISTS = "x0: a\n" + "".join(f"x{n + 1}: {[text] * 10}\n" for n, text in enumerate(TEN_LEVELS))
INTO_NUMBERS = "x0: 10\n" + "".join(f"x{n}: '${{mul:${{x{n - 1}}},${{x{n - 1}}}}}'\n" for n in range(1, 40))


def nested(levels: int) -> str:
    return "${mul:2," * levels + "1" + "}" * levels


INTO_ONE = f"x0: {'a' * 10_000}\nx1: '{'${x0}' * 10_000}'\n"


ENDLESS = {
    "bomb": (BOMB, "more than 100000 values once its aliases"),
    "merge-bomb": (MERGED, "more than 100000 values once its aliases"),
    "chain": (CHAIN, "nested more than 100 levels deep"),
    "lists": ("run: " + "[" * 5000 + "]" * 5000, "nested more than 100 levels deep"),
    "mappings": ("run: " + "{a: " * 150 + "}" * 150, "nested more than 100 levels deep"),
    "list-in-itself": ("run: &a [*a]", "an alias (*name) is inside the value"),
    "mapping-in-itself": ("run: &a {b: {c: *a}}", "an alias (*name) is inside the value"),
    "interpolation": ("env: {a: {x: '${env.b}'}, b: {x: '${env.a}'}}", "it contains itself"),
    "interpolations-into-text": (INTO_TEXT, f"x5: '{'${x4}' * 10}' can't be resolved"),
    "interpolations-into-lists": (INTO_LISTS, "x5.7: '${x4}' can't be resolved"),
    "interpolations-into-numbers": (INTO_NUMBERS, "x9: '${mul:${x8},${x8}}'"),
    "interpolations-into-one": (INTO_ONE, "it holds more than 100 interpolations"),
    "interpolations-inside-interpolations": (
        f"run: {{id: '{nested(200)}'}}",
        f"{nested(200)[:157]}…' can't be resolved",
    ),
    "as-many-as-may-be": (f"run: {{id: '{nested(99)}'}}", "run.id: "),
}


@pytest.mark.timeout(120)
def test_yaml_that_grows_without_end_is_refused_at_once(file: Path) -> None:
    for text, said in ENDLESS.values():
        file.write_text(text)
        assert said in refusal(file), text[:100]
    file.write_text("cluster: {}\n" + text)  # what may be read is translated where it is NeMo RL's
    assert said in refusal(file)


def test_a_file_is_parsed_once_to_say_where_each_key_stands(file: Path) -> None:
    file.write_text("grpo: {seed: 1}\nrun: {id: once}\n")
    origin = examine(file).origin
    with mock.patch.object(yaml_text, "_Loader", wraps=yaml_text._Loader) as parsed:
        assert [origin(keys)[-3:] for keys in (("grpo", "seed"), ("run", "id"))] == [":1)", ":2)"]
    assert parsed.call_count <= 1


def test_an_interpolated_list_inside_text_is_refused(file: Path) -> None:
    file.write_text("run: {id: 'of ${data.train}'}\ndata: {train: [{data_path: '${run.dir}'}]}")
    assert "run.id: 'of ${data.train}'" in refusal(file)


def test_interpolations_that_lead_to_each_other_are_evaluated_once(file: Path) -> None:
    doubled = [f"r{n}: '${{add:${{env.r{n - 1}}},${{env.r{n - 1}}}}}'" for n in range(1, 30)]
    file.write_text(f"env: {{r0: 1, {', '.join(doubled)}}}")
    assert f"env.r29: {1 << 29} is not a section" in refusal(file)


def test_an_alias_repeats_its_anchor(file: Path) -> None:
    file.write_text("env: {a: &math {type: math}, b: *math, c: {<<: *math, timeout_s: 7}}")
    env = load(file, [], {}).env
    assert env["a"] == env["b"]
    assert (env["c"].type, env["c"].timeout_s) == ("math", 7)


def test_bytes_that_are_not_text_are_refused(file: Path) -> None:
    file.write_bytes(b"run: {id: \xff\xfe}")
    assert "not text in UTF-8" in refusal(file)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("grpo.seed", "is not an override"),
        ("=3", "is not an override"),
        ("grpo..seed=3", "is not an override"),
        ("grpo.seed=[1", "grpo.seed: not valid YAML"),
        ("run.id={{ x }}", "run.id: not valid YAML: a key is a mapping"),
        ("grpo.seed=!!int abc", "grpo.seed: not valid YAML: 'abc' is not a valid int"),
        ("data.train.7.size=3", "data.train has 2 items; index '7'"),
        ("data.train.first.size=3", "data.train has 2 items; index 'first'"),
    ],
)
def test_an_override_that_is_none_is_refused(file: Path, override: str, said: str) -> None:
    assert said in refusal(file, override)


MARKS = [
    *":-?,[]{}#&*!|>%@`'\"\\\t\n\r\x00\x85",
    "- ",
    ": ",
    "\ufeff",
    "\ud800",
    "\u2028",
    "!!int ",
    "<<: ",
    "---\n",
    "|#",
    ">+2\n",
]


def test_both_readers_of_yaml_read_the_same(monkeypatch: pytest.MonkeyPatch, session_seed: int) -> None:
    rng = random.Random(session_seed)
    texts = [*(Path(__file__).parents[3] / "examples").glob("*.yaml")]

    def broken(text: str) -> str:
        lines = text.splitlines()
        start = rng.randrange(len(lines))
        text = "\n".join(lines[start : start + rng.randint(1, 12)])
        for _ in range(rng.randint(0, 4)):
            at = rng.randrange(len(text) + 1)
            text = text[:at] + rng.choice(["", *MARKS]) + text[at + rng.choice([0, 0, 1, 3]) :]
        return text

    def read(text: str) -> str:
        try:
            return repr(parse(text, "here"))
        except ConfigError as error:
            return str(error)

    documents = [broken(rng.choice(texts).read_text()) for _ in range(400)]
    fast = [read(each) for each in documents]
    monkeypatch.setattr(yaml_text, "_FastLoader", yaml_text._Loader)
    for document, found in zip(documents, fast, strict=True):
        assert found == read(document), document


def test_a_variable_that_is_no_yaml_is_refused(file: Path) -> None:
    assert "not valid YAML" in refusal(file, environ={"HEADRACE_DATA__TRAIN": "[{"})


# -- the keys there are ------------------------------------------------------------------------------------------------


def test_known_keys_reach_into_lists_and_mappings() -> None:
    assert {
        ("grpo", "async_grpo", "enabled"),
        ("env", "*", "type"),
        ("data", "train", "*", "size"),
    } <= known_keys().keys()
    assert pattern(("data", "train", "0", "size")) == ("data", "train", "*", "size")
    assert nearest(("zzzzzz",)) is None


# -- paths, items and names ------------------------------------------------------------------------------------------------------


def test_what_lies_beside_the_file_that_names_it_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    for folder in (project, elsewhere):
        (folder / "data").mkdir(parents=True)
        (folder / "data" / "sums.jsonl").write_text("")
    (elsewhere / "mine.jsonl").write_text("")
    (project / "model").mkdir()
    (project / "base.yaml").write_text(
        "policy: {model_name: ./model}\n"
        "data: {train: [{data_path: data/sums.jsonl, env_name: a}], validation: {data_path: mine.jsonl, env_name: a}}\n"
        "env: {a: {type: math}, b: {type: reward_model, model_name: model},\n"
        "  c: {type: llm_judge, rubric: x, judges: [{base_url: 'http://localhost:1/v1', model: m, api_key_file: data/sums.jsonl}]}}\n"
    )
    (project / "runs").mkdir()
    (project / "runs" / "run.yaml").write_text("defaults: ../base.yaml\n")
    monkeypatch.chdir(elsewhere)
    config = load("../project/runs/run.yaml", environ={})
    assert config.data.train[0].data_path == "../project/data/sums.jsonl"
    assert config.policy.model_name == "../project/model"
    assert config.env["b"].model_name == "../project/model"
    assert config.env["c"].judges[0].api_key_file == "../project/data/sums.jsonl"
    # what isn't there, and what the command line names, is as seen from where the command runs
    assert config.data.validation[0].data_path == "mine.jsonl"
    given = load("../project/runs/run.yaml", ["data.train.0.data_path=data/sums.jsonl"], {})
    assert given.data.train[0].data_path == "data/sums.jsonl"
    assert load("../project/base.yaml", environ={}).policy.tokenizer.name is None


def test_a_path_may_begin_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    file = tmp_path / "run.yaml"
    file.write_text(
        "run: {dir: ~/runs}\npolicy: {model_name: ~/m}\ndata: {train: [{data_path: ~/a.jsonl, env_name: e}], default: {env_name: e}}\n"
        "env: {e: {target: '~/e.py:E'}}\nlogger: {wandb: {name: ~/no path}}\n"
    )
    config = load(file, ["checkpointing.checkpoint_dir=~/c", "data.validation.data_path=~/b.jsonl"], {})
    (train,), (validation,) = config.data.train, config.data.validation
    found = (
        config.run.dir,
        config.policy.model_name,
        train.data_path,
        validation.data_path,
        config.checkpointing.checkpoint_dir,
    )
    assert found == ("/home/me/runs", "/home/me/m", "/home/me/a.jsonl", "/home/me/b.jsonl", "/home/me/c")
    assert config.env["e"].target == "/home/me/e.py:E"
    assert config.logger.wandb.name == "~/no path"


def test_a_runs_own_configuration_has_its_paths_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "x" / "checkpoints").mkdir(parents=True)
    saved = tmp_path / "runs" / "x" / "config.yaml"
    saved.write_text("run: {id: x, dir: runs}\npolicy: {model_name: checkpoints}\n")
    assert load(saved, environ={}).policy.model_name == "checkpoints"


def test_an_override_reaches_the_single_item_that_stands_for_a_list(file: Path) -> None:
    file.write_text("data: {train: {dataset_name: arithmetic, env_name: a}}\nenv: {a: {type: math}}\n")
    assert load(file, ["data.train.0.size=100"], {}).data.train[0].size == 100
    assert "data.train is a single item" in refusal(file, "data.train.1.size=100")
    for key in ("data.train.size", "data.train.0.size"):
        assert "data.train.size: 'many'" in refusal(file, f"{key}=many")
    file.write_text(file.read_text().replace("env_name: a", "env_name: a, size: '${grpo.seed}'"))
    assert "${grpo.seed}" in refusal(file, "grpo.seed=0").splitlines()[0]


def test_an_override_reaches_into_a_list_given_as_one_item(file: Path) -> None:
    """As a run saves it."""
    file.write_text("data: {train: [{dataset_name: arithmetic, env_name: a}]}\nenv: {a: {command: [serve]}}\n")
    (source,) = load(file, ["data.train.size=100"], {"HEADRACE_DATA": "{train: {seed: 7}}"}).data.train
    assert (source.dataset_name, source.size, source.seed) == ("arithmetic", 100, 7)
    assert "data.train.0.size: 'many'" in refusal(file, "data.train.size=many")
    assert "env.a.command has 1 item" in refusal(file, "env.a.command.size=1")
    file.write_text("data: {train: [{dataset_name: arithmetic}, {dataset_name: arithmetic}]}\n")
    assert "data.train has 2 items" in refusal(file, "data.train.size=1")


@pytest.mark.parametrize(
    ("variables", "override"),
    [
        ({"DATA__TRAIN__SYSTEM_PROMPT": "spoken"}, "data.train=[{dataset_name: arithmetic, env_name: a}]"),
        ({"DATA__TRAIN": "[{dataset_name: arithmetic, env_name: a}]"}, "data.train.0.system_prompt=written"),
    ],
)
def test_the_command_line_replaces_and_adds_to_what_a_variable_gives(
    file: Path, variables: dict[str, str], override: str
) -> None:
    file.write_text("env: {a: {type: math}}\n")
    (source,) = load(file, [override], {f"HEADRACE_{name}": value for name, value in variables.items()}).data.train
    assert source.env_name == "a"
    assert source.system_prompt == ("written" if "written" in override else None)


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("grpo.beta", "loss_fn.reference_policy_kl_penalty"),
        ("algorithm.kl_coef", "loss_fn.reference_policy_kl_penalty"),
        ("ppo.total_epochs", "ppo.max_num_epochs"),
        ("policy.optimizer.kwargs.beta", "policy.optimizer.kwargs.betas"),
        ("actor_rollout_ref.rollout.n", "grpo.num_generations_per_prompt"),
    ],
)
def test_a_name_of_another_framework_leads_to_the_key(file: Path, key: str, meant: str) -> None:
    assert nearest(tuple(key.split("."))) == meant
    if key.startswith("grpo"):
        assert refusal(file, f"{key}=0.1").endswith(f"did you mean {meant}?")


def test_every_name_of_another_framework_leads_to_a_key_there_is() -> None:
    assert [key for key in NAMES.values() if tuple(key.split(".")) not in known_keys()] == []


def test_the_paths_of_an_evaluation_start_where_its_run_was_started(tmp_path: Path) -> None:
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "asked.txt").write_text("{}")
    saved = tmp_path / "runs" / "first" / "config.yaml"
    saved.parent.mkdir(parents=True)
    saved.write_text(
        f"run: {{id: first, dir: {tmp_path}/runs, started_in: ../../start}}\n"
        "env: {math: {}}\n"
        "data: {default: {env_name: math}, evaluate: {mine: {dataset_name: gsm8k, prompt_file: asked.txt}}}\n"
    )
    evaluated = load(saved, [], {}).data.evaluate
    assert evaluated is not None
    assert evaluated["mine"] is not None
    assert evaluated["mine"].prompt_file == str(tmp_path / "start" / "asked.txt")
