"""What came from the environment is used, and stored and shown as the expression that gives it."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.base.errors import ConfigError
from headrace.config import Config, load
from headrace.config.compare import diff
from headrace.config.yaml_text import dump

CANARY = "canary-7f3a'9\\"
BASE = """\
env: {math: {type: math}}
data: {train: {dataset_name: arithmetic, env_name: math}}
"""


@pytest.fixture(autouse=True)
def _secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HR_SECRET", CANARY)
    monkeypatch.setenv("HR_WORD", "canary-word")
    monkeypatch.setenv("HR_NAMED", "HR_SECRET")
    monkeypatch.setenv("HR_LIST", f'[serve, "--key", "{CANARY[:-1]}"]')


def loaded(folder: Path, text: str, *overrides: str) -> Config:
    file = folder / "run.yaml"
    file.write_text(BASE + text)
    return load(file, overrides)


def refusal(folder: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        loaded(folder, text, *overrides)
    return str(error.value)


def project(expression: str) -> str:
    return f'logger: {{wandb: {{project: "{expression}"}}}}\n'


@pytest.mark.parametrize(
    ("text", "stored"),
    [
        (project("${oc.env:HR_SECRET}"), "${oc.env:HR_SECRET}"),
        (project("a-${oc.env:HR_SECRET}-${oc.env:HR_SECRET}"), "a-${oc.env:HR_SECRET}-${oc.env:HR_SECRET}"),
        (project("${oc.env:HR_SECRET,other}"), "${oc.env:HR_SECRET,other}"),
        (project("${oc.env:HR_SECRET,null}"), "${oc.env:HR_SECRET,null}"),
        (project("${oc.env:HR_NONE,${oc.env:HR_SECRET}}"), "${oc.env:HR_NONE,${oc.env:HR_SECRET}}"),
        (project("${oc.env:HR_NONE,'a, ${oc.env:HR_SECRET}'}"), "${oc.env:HR_NONE,'a, ${oc.env:HR_SECRET}'}"),
        (project("${oc.env:${oc.env:HR_NAMED}}"), "${oc.env:${oc.env:HR_NAMED}}"),
        (project("${oc.decode:${oc.env:HR_SECRET_TEXT,x}}"), "${oc.decode:${oc.env:HR_SECRET_TEXT,x}}"),
        (project(r"\\\\${oc.env:HR_SECRET}"), r"\\${oc.env:HR_SECRET}"),
        (project(r"\\${x} ${oc.env:HR_SECRET}"), r"\${x} ${oc.env:HR_SECRET}"),
        ("logger: {wandb: {project: '${.entity}', entity: '${oc.env:HR_SECRET}'}}\n", "${oc.env:HR_SECRET}"),
    ],
)
def test_it_is_stored_as_its_expression(tmp_path: Path, text: str, stored: str) -> None:
    config = loaded(tmp_path, text)
    assert config.show()["logger"]["wandb"]["project"] == stored
    saved = dump(config)
    assert CANARY not in saved
    assert CANARY[:10] not in saved
    (tmp_path / "saved.yaml").write_text(saved)
    assert load(tmp_path / "saved.yaml") == config
    assert dump(load(tmp_path / "saved.yaml")) == saved


@pytest.mark.parametrize(
    "text",
    [
        "env.judge={command: '${oc.decode:${oc.env:HR_LIST}}'}",
        "env.judge={command: [serve, --key, '${oc.env:HR_SECRET}']}",
        "data.default.system_prompt=${oc.env:HR_SECRET}",
        "data.train.system_prompt=${oc.env:HR_SECRET}",
        "policy.tokenizer.chat_template_kwargs={deep: [{key: '${oc.env:HR_SECRET}'}]}",
        "replay.redis_url=redis://:${oc.env:HR_WORD}@host/0",
    ],
)
def test_so_is_what_stands_in_a_list_a_mapping_or_another_place(tmp_path: Path, text: str) -> None:
    config = loaded(tmp_path, "", text)
    saved = dump(config)
    assert "canary" not in saved
    (tmp_path / "saved.yaml").write_text(saved)
    assert load(tmp_path / "saved.yaml") == config


def test_a_variable_that_sets_a_key_is_one_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_REPLAY__REDIS_URL", "redis://me:canary@host/0")
    config = loaded(tmp_path, "")
    assert config.replay.redis_url == "redis://me:canary@host/0"
    assert config.show()["replay"]["redis_url"] == "${oc.env:HEADRACE_REPLAY__REDIS_URL}"
    assert config.variables == {"HEADRACE_REPLAY__REDIS_URL"}
    over = loaded(tmp_path, "", "replay.redis_url=redis://host/0")
    assert (over.show()["replay"]["redis_url"], over.variables) == ("redis://host/0", set())


def test_paths_models_numbers_and_names_are_stored_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HR_SEED", "7")
    monkeypatch.setenv("HR_JOB", "job-1")
    given = [
        "grpo.seed=${oc.env:HR_SEED}",
        "run.id=${oc.env:HR_JOB}",
        "policy.model_name=models/${oc.env:HR_JOB}",
        "data.train.system_prompt_file=${oc.env:HR_JOB}.txt",
        "checkpointing.checkpoint_dir=/ckpt/${oc.env:HR_JOB}",
    ]
    saved = dump(loaded(tmp_path, "", *given))
    assert "oc.env" not in saved
    for variable in ("HR_SEED", "HR_JOB"):
        monkeypatch.delenv(variable)
    (tmp_path / "saved.yaml").write_text(saved)
    config = load(tmp_path / "saved.yaml")
    assert (config.algorithm.seed, config.run.id, config.policy.model_name) == (7, "job-1", "models/job-1")


@pytest.mark.parametrize(
    "text", ["${${oc.env:HR_A}.model_name}", "${oc.select:${oc.env:HR_A}.model_name}", "${oc.decode:${oc.env:HR_B}}"]
)
def test_the_name_of_a_key_may_be_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("HR_A", "policy")
    monkeypatch.setenv("HR_B", "${policy.model_name}")
    config = loaded(tmp_path, "", f"run.id={text}", "policy.model_name=job-1")
    assert config.run.id == "job-1"


def test_a_section_may_be_given_by_its_name(tmp_path: Path) -> None:
    given = "policy.tokenizer.chat_template_kwargs={of: '${logger.wandb}'}"
    config = loaded(tmp_path, "", given, "logger.wandb.project=mine")
    assert config.policy.tokenizer.chat_template_kwargs == {"of": config.logger.wandb.model_dump()}


def test_without_the_variable_the_error_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "saved.yaml").write_text(dump(loaded(tmp_path, project("${oc.env:HR_SECRET}"))))
    monkeypatch.delenv("HR_SECRET")
    with pytest.raises(ConfigError, match=r"logger\.wandb\.project: .*'HR_SECRET'"):
        load(tmp_path / "saved.yaml")


@pytest.mark.parametrize(
    "override",
    [
        "replay.redis_url=[1, '${oc.env:HR_SECRET}']",
        "grpo.nothing=${oc.env:HR_SECRET}",
        "data.train.env_name=${oc.env:HR_SECRET}",
        "env.judge={type: llm_judge, rubric: x, judges: [{base_url: 'http://${oc.env:HR_SECRET}@host', model: m}]}",
        "env.judge={command: {a: '${oc.env:HR_SECRET}'}}",
        "grpo.seed=${mul:${oc.env:HR_SECRET},2}",
        "grpo.seed=${oc.decode:${oc.env:HR_SECRET}}",
    ],
)
def test_no_error_shows_it(tmp_path: Path, override: str) -> None:
    message = refusal(tmp_path, "", override)
    assert "canary" not in message
    assert "oc.env:HR_SECRET" in message


def test_no_error_shows_the_password_of_an_address(tmp_path: Path) -> None:
    assert "canary" not in refusal(tmp_path, "", "replay.redis_urls=redis://me:canary@host/0")


def test_a_change_is_shown_by_the_expressions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = loaded(tmp_path, "replay: {redis_url: 'redis://me:canary@host/0'}\n")
    monkeypatch.setenv("HR_URL", "redis://me:canary@other/0")
    (change,) = diff(before, loaded(tmp_path, "replay: {redis_url: '${oc.env:HR_URL}'}\n"))
    assert str(change) == "replay.redis_url: 'redis://me:***@host/0' -> '${oc.env:HR_URL}'"


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("ENV__JUDGE__COMMAND", "[serve, --key, canary-1]"),
        ("ENV__JUDGE", "{command: [serve, --key, canary-1]}"),
        ("ENV", '{math: {type: math}, judge: {command: [serve, --key, "canary\'s"]}}'),
        ("POLICY__TOKENIZER__CHAT_TEMPLATE_KWARGS", '{deep: [{"it\'s a, key": canary-1}]}'),
        ("DATA__TRAIN", "[{dataset_name: arithmetic, env_name: math, system_prompt: canary-1}]"),
        # a mapping that stands for a list of one, which is saved as a list
        ("DATA", "{train: {dataset_name: arithmetic, env_name: math, system_prompt: canary-1}}"),
        ("DATA__TRAIN", "{dataset_name: arithmetic, env_name: math, system_prompt: canary-1}"),
        ("DATA__TRAIN__SYSTEM_PROMPT", "canary-1"),
        ("DATA__TRAIN__0__SYSTEM_PROMPT", "canary-1"),
        ("LOGGER", "{wandb: {name: canary-1}}"),
    ],
)
def test_so_is_the_text_in_a_list_or_a_mapping_that_a_variable_gives(
    variable: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"HEADRACE_{variable}", value)
    config = loaded(tmp_path, "")
    saved = dump(config)
    assert "canary" not in saved
    assert config.variables == {f"HEADRACE_{variable}"}
    (tmp_path / "saved.yaml").write_text(saved)
    assert load(tmp_path / "saved.yaml") == config
    by_expressions = load(tmp_path / "saved.yaml", environ={})
    assert (by_expressions.model_dump(), dump(by_expressions)) == (config.model_dump(), saved)
    monkeypatch.delenv(f"HEADRACE_{variable}")
    with pytest.raises(ConfigError, match=f"'HEADRACE_{variable}' not found"):
        load(tmp_path / "saved.yaml")
