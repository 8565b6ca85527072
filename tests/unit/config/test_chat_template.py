"""The run's own chat template: text, or a file whose text the run keeps."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from headrace.base.errors import ConfigError
from headrace.config import load
from tests.unit.config.nemo_cases import read, refusal

TEXT = "{% for message in messages %}{{ message.content }}{% endfor %}\n"


def template_of(path: Path, value: str | None) -> str | None:
    path.write_text(yaml.safe_dump({"policy": {"tokenizer": {"chat_template": value}}}))
    return load(path).policy.tokenizer.chat_template


def test_a_file_is_read_from_beside_the_file_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "short.jinja").write_text(TEXT)
    assert template_of(tmp_path / "run.yaml", "short.jinja") == TEXT
    again = tmp_path / "again.yaml"
    again.write_text(yaml.safe_dump(load(tmp_path / "run.yaml").show()))
    (tmp_path / "short.jinja").unlink()
    assert load(again).policy.tokenizer.chat_template == TEXT
    assert template_of(again, TEXT) == TEXT
    assert template_of(again, None) is None


@pytest.mark.parametrize(("value", "said"), [("lost.jinja", "can't be read"), ("chatml", "neither a Jinja template")])
def test_what_is_no_template_is_said(tmp_path: Path, value: str, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"^policy\.tokenizer\.chat_template: .*{said}"):
        template_of(tmp_path / "run.yaml", value)


@pytest.mark.parametrize(
    ("value", "template"),
    [("null", TEXT.strip()), ("default", None), ("'{{ messages[0].content }}'", "{{ messages[0].content }}")],
)
def test_nemo_rl_has_a_template_for_null(tmp_path: Path, value: str, template: str | None) -> None:
    config, _ = read(tmp_path, f"policy: {{tokenizer: {{chat_template: {value}}}}}")
    assert config.policy.tokenizer.chat_template == template
    assert read(tmp_path)[0].policy.tokenizer.chat_template is None


SERVER = "policy.generation.vllm_cfg.http_server_serving_chat_kwargs"


def test_the_template_of_nemo_rl_s_chat_server_is_the_run_s(tmp_path: Path) -> None:
    config, translation = read(tmp_path, "", f"{SERVER}={{chat_template: '{{{{ 1 }}}}', enable_auto_tools: true}}")
    assert config.policy.tokenizer.chat_template == "{{ 1 }}"
    assert (f"{SERVER}.chat_template", "policy.tokenizer.chat_template") in translation.renamed
    arguments = (f"{SERVER}.default_chat_template_kwargs={{thinks: false}}",)
    assert read(tmp_path, "", *arguments)[0].policy.tokenizer.chat_template_kwargs == {"thinks": False}
    (line,) = refusal(tmp_path, "", *arguments, "policy.tokenizer.chat_template_kwargs={thinks: true}")
    assert line.startswith(f"{SERVER}.default_chat_template_kwargs: ")


@pytest.mark.parametrize("section", ["policy.tokenizer", "policy.generation", "policy.generation.vllm_cfg"])
def test_thinking_is_an_argument_of_the_template(tmp_path: Path, section: str) -> None:
    config, _ = read(tmp_path, "", f"{section}.enable_thinking=false")
    assert config.policy.tokenizer.chat_template_kwargs == {"enable_thinking": False}
    own = "policy.tokenizer.chat_template_kwargs={enable_thinking: true}"
    config, _ = read(tmp_path, "", f"{section}.enable_thinking=false", own)
    assert config.policy.tokenizer.chat_template_kwargs == {"enable_thinking": True}
