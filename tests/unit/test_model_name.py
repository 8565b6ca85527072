"""A model that isn't there is refused by its name, and in time; one on the hub is not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.base.errors import ServiceError
from headrace.base.model_name import MODEL, TOKENIZER
from tests.support.http_server import Quiet, serving
from tests.support.ports import free_port

KEY = "policy.model_name"
CHECK = "import sys; from headrace.base import model_name; getattr(model_name, sys.argv[1]).check(*sys.argv[2:])"


def test_a_directory_without_config_json_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match=r"policy\.model_name: .*config\.json"):
        MODEL.check(KEY, str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    MODEL.check(KEY, str(tmp_path))


@pytest.mark.parametrize(
    "name",
    ["/no/such/model", "./no-such-model", "~/no-such-model", "models/no/such", "models/", "my model", "models--tiny"],
)
def test_what_no_model_of_the_hub_can_be_named_is_refused_by_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the checkout may hold a directory `models`
    with pytest.raises(ServiceError, match=r"policy\.model_name: .*exist") as caught:
        MODEL.check(KEY, name)
    assert name in str(caught.value)


class Hub(Quiet):
    """As the hub answers for the one model that it has, after it has been too busy for `busy` requests."""

    busy = 0

    def do_HEAD(self) -> None:
        if Hub.busy:
            Hub.busy -= 1
            self.send_response(503)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        model, _, file = self.path.partition("/resolve/main/")
        there = model == "/models/real" and file in ("config.json", "tokenizer.json")
        error = "EntryNotFound" if model == "/models/real" else "RepoNotFound"
        headers = {"ETag": '"e"', "X-Repo-Commit": "c" * 40} if there else {"X-Error-Code": error}
        self.send_response(200 if there else 404)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", "2" if there else "0")
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()
        self.wfile.write(b"{}")


@pytest.fixture
def hub() -> Iterator[str]:
    with serving(Hub) as address:
        yield f"http://{address}"


def complaint(name: str, home: Path, kind: str = "MODEL", key: str = KEY, **environ: str) -> str:
    """What the check says of `name` in a process of its own, which reads the hub's settings at its start; empty if nothing.

    It runs in an empty directory: a relative name like models/tiny may be a directory of the checkout.
    """
    done = asked(name, home, kind, key, **environ)
    return done.stderr.splitlines()[-1] if done.returncode else ""


def asked(
    name: str, home: Path, kind: str = "MODEL", key: str = KEY, **environ: str
) -> subprocess.CompletedProcess[str]:
    empty = home / "empty"
    empty.mkdir(parents=True, exist_ok=True)
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "TRANSFORMERS_"))}
    return subprocess.run(
        [sys.executable, "-c", CHECK, kind, key, name],
        cwd=empty,
        env={**kept, "HF_HOME": str(home), **environ},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_model_of_the_hub_is_taken_and_then_the_hub_may_be_away(hub: str, tmp_path: Path) -> None:
    assert "on the Hugging Face Hub" in complaint("models/tiny", tmp_path, HF_ENDPOINT=hub)
    assert complaint("models/real", tmp_path, HF_ENDPOINT=hub) == ""
    assert complaint("models/real", tmp_path, HF_HUB_OFFLINE="1") == ""


def test_where_nothing_can_be_reached_the_hub_is_asked_once(tmp_path: Path) -> None:
    done = asked("models/tiny", tmp_path, HF_ENDPOINT=f"http://127.0.0.1:{free_port()}")
    assert "([Errno 111] Connection refused)" in done.stderr
    assert "Retry" not in done.stderr


def test_the_error_of_a_hub_behind_a_proxy_names_the_proxy(tmp_path: Path) -> None:
    proxy = f"127.0.0.1:{free_port()}"
    said = complaint(
        "models/tiny", tmp_path, HF_ENDPOINT="http://hub.invalid", http_proxy=f"http://me:canary@{proxy}", no_proxy=""
    )
    assert f"http://***@{proxy} (http_proxy" in said
    assert "canary" not in said


def test_a_busy_hub_is_asked_again(hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Hub, "busy", 3)
    assert complaint("models/real", tmp_path, HF_ENDPOINT=hub) == ""


def test_a_tokenizer_is_known_by_its_own_files(hub: str, tmp_path: Path) -> None:
    key = "policy.tokenizer.name"
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ServiceError, match=r"policy\.tokenizer\.name: .*tokenizer_config\.json"):
        TOKENIZER.check(key, str(tmp_path))
    with pytest.raises(ServiceError, match=r"\./misspelt .*tokenizer"):
        TOKENIZER.check(key, "./misspelt")
    (tmp_path / "tokenizer.json").write_text("{}")
    TOKENIZER.check(key, str(tmp_path))

    home, kind = tmp_path / "home", "TOKENIZER"
    assert "no tokenizer of that name" in complaint("models/tiny", home, kind, key, HF_ENDPOINT=hub)
    # it has no tokenizer_config.json
    assert complaint("models/real", home, kind, key, HF_ENDPOINT=hub) == ""
    assert complaint("models/real", home, kind, key, HF_HUB_OFFLINE="1") == ""


def test_offline_a_name_in_no_cache_is_refused_with_that_reason(tmp_path: Path) -> None:
    said = complaint("models/tiny", tmp_path, HF_HUB_OFFLINE="1")
    assert "models/tiny is not a local directory" in said
    assert "offline mode is enabled" in said


def test_what_is_here_is_told_without_asking_anybody(tmp_path: Path) -> None:
    for kind, lacks, file in (
        (MODEL, r"has no config\.json", "config.json"),
        (TOKENIZER, r"has no tokenizer_config\.json or tokenizer\.json", "tokenizer.json"),
    ):
        assert not kind.is_here(KEY, "somebody/a-model-that-nobody-has")
        with pytest.raises(ServiceError, match=lacks):
            kind.is_here(KEY, str(tmp_path))
        (tmp_path / file).write_text("{}")
        assert kind.is_here(KEY, str(tmp_path))
        with pytest.raises(ServiceError, match="does not exist"):
            kind.is_here(KEY, "./models/that-nobody-makes")
