"""`defaults`, `_override_` and `${…}`: files that build on files, and values that follow from others."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.errors import ConfigError
from headrace.config import Config, load
from headrace.config.in_yaml import escape
from headrace.config.interpolate import resolve
from headrace.config.yaml_text import dump
from tests.support.configurations import refusal


def write(folder: Path, **files: str) -> Path:
    """Files by their names (without suffix, `__` a folder); the path of the last."""
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return path


def loaded(path: Path, *overrides: str, environ: dict[str, str] | None = None) -> Config:
    return load(path, overrides, environ or {})


# -- defaults ----------------------------------------------------------------------------------------------------------


def test_a_file_wins_over_its_base_and_that_one_over_its_own(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        base="policy: {max_total_sequence_length: 64, max_grad_norm: 2, generation: {max_new_tokens: 8}}",
        recipes__middle="defaults: ../base.yaml\npolicy: {max_grad_norm: 3, optimizer: {kwargs: {lr: 1e-3}}}",
        recipes__deep__child="defaults: ../middle.yaml\npolicy: {optimizer: {kwargs: {eps: 1e-6}}}",
    )
    policy = loaded(path).policy
    assert (policy.max_total_sequence_length, policy.max_grad_norm, policy.generation.max_new_tokens) == (64, 3, 8)
    assert (policy.optimizer.kwargs.lr, policy.optimizer.kwargs.eps) == (1e-3, 1e-6)


def test_of_several_defaults_the_later_wins(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        a="loss_fn: {ratio_clip_min: 0.1, ratio_clip_max: 0.1}",
        b="loss_fn: {ratio_clip_max: 0.3}",
        child="defaults: [a.yaml, b.yaml]\nrun: {id: x}",
    )
    loss = loaded(path).loss_fn
    assert (loss.ratio_clip_min, loss.ratio_clip_max) == (0.1, 0.3)


def test_lists_are_replaced_whole(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        base="policy: {generation: {stop_token_ids: [1, 2]}}",
        child="defaults: base.yaml\npolicy: {generation: {stop_token_ids: [3]}}",
    )
    assert loaded(path).policy.generation.stop_token_ids == [3]


def test_override_replaces_a_mapping_at_any_depth(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        base="env: {a: {type: math}, b: {type: math}}\npolicy: {optimizer: {kwargs: {lr: 1, eps: 1}}}",
        child="defaults: base.yaml\nenv: {_override_: true, c: {type: math}}\n"
        "policy: {optimizer: {kwargs: {_override_: true, lr: 2}}}",
        merging="defaults: base.yaml\nenv: {_override_: false, c: {type: math, _override_: true}}",
    )
    child = loaded(tmp_path / "child.yaml")
    assert child.env.keys() == {"c"}
    assert (child.policy.optimizer.kwargs.lr, child.policy.optimizer.kwargs.eps) == (2, 1e-8)
    assert loaded(path).env.keys() == {"a", "b", "c"}


def test_an_override_mark_that_is_neither_true_nor_false_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, child="policy: {optimizer: {_override_: maybe}}")
    assert f"{path}: policy.optimizer._override_: 'maybe'" in refusal(path)


def test_null_removes_an_inherited_section_and_is_empty_elsewhere(tmp_path: Path) -> None:
    path = write(tmp_path, base="loss_fn: {ratio_clip_max: 0.3}\ndata:", child="defaults: base.yaml\nloss_fn:\n")
    assert loaded(path).loss_fn == Config().loss_fn
    assert loaded(tmp_path / "base.yaml").data == Config().data


@pytest.mark.parametrize("order", ["grpo: {seed: 5}\nppo: null", "ppo:\ngrpo: {seed: 5}"])
def test_null_leaves_out_the_algorithm_that_is_not_meant(tmp_path: Path, order: str) -> None:
    swapped = order.replace("grpo", "other").replace("ppo", "grpo").replace("other", "ppo")
    grpo, ppo = loaded(write(tmp_path, run=order)), loaded(write(tmp_path, run=swapped))
    assert (grpo.algorithm, grpo.ppo, grpo.algorithm.seed) == (grpo.grpo, None, 5)
    assert (ppo.algorithm, ppo.grpo, ppo.algorithm.seed) == (ppo.ppo, None, 5)
    inheriting = write(tmp_path, base="grpo: {seed: 5}", run="defaults: base.yaml\nppo: null")
    assert loaded(inheriting).algorithm.seed == 5
    assert "grpo and ppo are both given" in refusal(write(tmp_path, run="grpo:\nppo:"))


def test_precedence_is_command_line_environment_file_base_built_in(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        base="grpo: {num_prompts_per_step: 2, num_generations_per_prompt: 2, max_num_steps: 2, seed: 2}",
        child="defaults: base.yaml\ngrpo: {num_generations_per_prompt: 3, max_num_steps: 3, seed: 3}",
    )
    environ = {"HEADRACE_GRPO__MAX_NUM_STEPS": "4", "HEADRACE_GRPO__SEED": "4"}
    grpo = loaded(path, "grpo.seed=5", environ=environ).grpo
    assert grpo is not None
    given = (grpo.num_prompts_per_step, grpo.num_generations_per_prompt, grpo.max_num_steps, grpo.seed)
    assert given == (2, 3, 4, 5)
    assert grpo.val_period == Config().algorithm.val_period


def test_a_cycle_is_refused_by_its_names(tmp_path: Path) -> None:
    path = write(tmp_path, a="defaults: b.yaml", b="defaults: ./a.yaml")
    message = refusal(path)
    assert "builds on itself" in message
    assert f"{tmp_path / 'b.yaml'} -> {tmp_path / 'a.yaml'} -> {tmp_path / 'b.yaml'}" in message


def test_two_ways_to_one_file_are_no_cycle(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        base="run: {dir: there}",
        a="defaults: base.yaml",
        b="defaults: base.yaml",
        child="defaults: [a.yaml, b.yaml]",
    )
    assert loaded(path).run.dir == "there"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("defaults: gone.yaml", "gone.yaml: can't read"),
        ("defaults: {a: b}", "defaults: {a: b}"),
        ("defaults: [a, 1]", "defaults: [a, 1]"),
    ],
    ids=["missing", "mapping", "number"],
)
def test_defaults_that_name_no_file_are_refused(tmp_path: Path, text: str, said: str) -> None:
    assert said in refusal(write(tmp_path, child=text))


def test_an_error_names_the_inherited_file_that_holds_the_value(tmp_path: Path) -> None:
    path = write(
        tmp_path, base="grpo: {seed: many, val_perod: 1}", child="defaults: base.yaml\nloss_fn: {ratio_clip_max: x}"
    )
    lines = refusal(path).splitlines()
    assert f"grpo.seed: 'many' should be a valid integer ({tmp_path / 'base.yaml'}:1)" in lines[0]
    assert f"grpo.val_perod: unknown key, value 1 ({tmp_path / 'base.yaml'}:1); did you mean grpo.val_period?" in lines
    assert f"({path}:2)" in lines[-1]
    assert "(command line)" in refusal(path, "grpo.seed=few").splitlines()[0]


# -- interpolation -----------------------------------------------------------------------------------------------------

LINKED = """
grpo: {num_prompts_per_step: 4, num_generations_per_prompt: 8}
policy:
  max_total_sequence_length: 96
  train_micro_batch_size: "${div:${policy.max_total_sequence_length}, 32}"
  logprob_batch_size: ${mul:2, ${.train_micro_batch_size}}
  generation:
    max_new_tokens: ${sub:${policy.max_total_sequence_length}, 32}
    val_temperature: ${.temperature}
    temperature: 0.5
data:
  max_input_seq_length: ${max:${add:8, 8}, 12}
"""


def test_values_follow_from_others(tmp_path: Path) -> None:
    config = loaded(write(tmp_path, run=LINKED))
    assert (config.policy.train_micro_batch_size, config.policy.logprob_batch_size) == (3, 6)
    assert (config.policy.generation.max_new_tokens, config.policy.generation.val_temperature) == (64, 0.5)
    assert config.data.max_input_seq_length == 16


def test_long_chains_are_refused_unless_nearer_values_come_first() -> None:
    chain = {"x0": 7} | {f"x{n}": f"${{x{n - 1}}}" for n in range(1, 40)}
    assert resolve(chain, chain) == dict.fromkeys(chain, 7)
    turned = dict(reversed(chain.items()))
    with pytest.raises(ConfigError, match=r"x39: '\$\{x38\}'.*20 others"):
        resolve(turned, turned)


def test_an_override_reaches_what_follows_from_it(tmp_path: Path) -> None:
    path = write(tmp_path, run=LINKED, child="defaults: run.yaml\npolicy: {generation: {temperature: 0.25}}")
    assert loaded(path).policy.generation.val_temperature == 0.25
    assert loaded(path, "policy.max_total_sequence_length=128").policy.generation.max_new_tokens == 96
    environ = {"HEADRACE_POLICY__GENERATION__TEMPERATURE": "0.75"}
    assert loaded(path, environ=environ).policy.generation.val_temperature == 0.75
    assert loaded(path, "grpo.seed=${mul:2,${grpo.num_prompts_per_step}}").algorithm.seed == 8


def test_a_key_that_no_file_gives_has_its_default(tmp_path: Path) -> None:
    path = write(
        tmp_path, run="policy: {generation: {max_new_tokens: '${sub:${policy.max_total_sequence_length}, 2}'}}"
    )
    assert loaded(path).policy.generation.max_new_tokens == Config().policy.max_total_sequence_length - 2


def test_a_single_data_set_stands_beside_interpolations(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        run="grpo: {max_val_samples: '${data.train.size}'}\nenv: {math: {}}\n"
        "data: {train: {dataset_name: arithmetic, size: 40, env_name: math}}",
    )
    assert loaded(path).algorithm.max_val_samples == 40


def test_sections_and_lists_can_be_referred_to_whole(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        run="env: {a: {type: math, timeout_s: 7}, b: '${env.a}'}\n"
        "data: {train: [{data_path: x, env_name: a}], validation: '${data.train}'}",
    )
    config = loaded(path, "env.a.timeout_s=8")
    assert config.env["b"] == config.env["a"]
    assert config.env["b"].timeout_s == 8
    assert config.data.validation == config.data.train


def test_environment_variables_with_and_without_a_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(
        tmp_path, run="run: {dir: '${oc.env:HR_DIR,elsewhere}/x'}\nloss_fn: {ratio_clip_max: '${oc.env:HR_CLIP,1e-6}'}"
    )
    assert (loaded(path).run.dir, loaded(path).loss_fn.ratio_clip_max) == ("elsewhere/x", 1e-6)
    monkeypatch.setenv("HR_DIR", "/data")
    monkeypatch.setenv("HR_CLIP", "0.25")
    assert (loaded(path).run.dir, loaded(path).loss_fn.ratio_clip_max) == ("/data/x", 0.25)


def test_numbers_stay_numbers(tmp_path: Path) -> None:
    path = write(
        tmp_path, run="policy: {optimizer: {kwargs: {lr: 1e-6, eps: '${mul:${policy.optimizer.kwargs.lr}, 1e-2}'}}}"
    )
    kwargs = loaded(path).policy.optimizer.kwargs
    assert (kwargs.lr, kwargs.eps) == (1e-6, 1e-8)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("${grpo.nothing}", "Interpolation key 'grpo.nothing' not found"),
        ("${grpo.seed}", "Recursive interpolation detected"),
        ("${plus:1,2}", "Unsupported interpolation type plus"),
        ("${div:1,0}", "division by zero"),
        ("${mul:1,x}", "mul takes two numbers, not 1, 'x'"),
        ("${oc.env:HR_NOWHERE}", "Environment variable 'HR_NOWHERE' not found"),
        ("${grpo.seed", "can't be resolved"),
    ],
    ids=["key", "cycle", "function", "zero", "type", "variable", "brace"],
)
def test_what_stands_for_nothing_is_named_with_its_key(tmp_path: Path, value: str, reason: str) -> None:
    path = write(tmp_path, run=f"grpo: {{seed: '{value}'}}\nrun: {{id: '${{nowhere}}'}}")
    first, *others = refusal(path).splitlines()
    assert first.startswith("grpo.seed: ")
    assert reason in first
    assert "can't be resolved" in first
    assert r"write \${ for the text ${" in first
    assert bool(others) == (value != "${grpo.seed")  # what can't be parsed is said before anything is looked up


def test_a_value_that_has_to_be_given_is_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path, run="policy: {model_name: '???'}")
    assert "policy.model_name: ???" in refusal(path)
    assert loaded(path, "policy.model_name=here").policy.model_name == "here"


def test_an_error_in_a_value_shows_the_interpolation_it_came_from(tmp_path: Path) -> None:
    path = write(tmp_path, run="policy: {train_micro_batch_size: '${div:3,2}'}")
    assert "policy.train_micro_batch_size: 1.5 " in refusal(path)
    assert f"({path}:1, ${{div:3,2}})" in refusal(path)


def test_an_override_inside_what_is_taken_from_elsewhere_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, run="env: {a: {type: math}, b: '${env.a}'}")
    assert "env.b is '${env.a}'" in refusal(path, "env.b.timeout_s=1")


@given(st.lists(st.sampled_from(["$", "{", "}", "\\", "a.b", ":", ",", "'", " "]), max_size=12).map("".join))
def test_escaped_text_stays_what_it_was(text: str) -> None:
    if text != "???":
        assert resolve({"a": [escape(text)]}, {"a": [escape(text)]}) == {"a": [text]}


def test_what_show_prints_loads_as_the_same_configuration(tmp_path: Path) -> None:
    config = loaded(write(tmp_path, run=r"run: {dir: 'a\${x}\\\${y}$z'}" "\n" + LINKED))
    assert config.run.dir.startswith("a${x}")
    again = tmp_path / "again.yaml"
    again.write_text(dump(config))
    assert loaded(again) == config
