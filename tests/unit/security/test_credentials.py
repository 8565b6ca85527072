"""The file of credentials: who it is for, what is accepted and presented, and what a change of it does."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest

from headrace.base.errors import ConfigError, is_outage
from headrace.cli.credentials import assign_roles
from headrace.config import Config
from headrace.net.credentials import REDIS_ROLES, Credentials, buffer_url, complete, list_roles


def config_of(path: Path | None, **sections: Any) -> Config:
    security = {} if path is None else {"credentials": str(path)}
    return Config.model_validate({"run": {"id": "adder"}, "security": security, **sections})


def test_a_new_file_is_its_owners_alone_and_keeps_its_tokens(tmp_path: Path) -> None:
    path = tmp_path / "new" / "credentials"
    complete(path, ["operator", "environment math"])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    before = Credentials(path).token("environment math")
    complete(path, ["operator", "environment math", "reader"])
    after = Credentials(path)
    assert after.token("environment math") == before
    assert len({after.token(name) for name in ("operator", "reader", "environment math")}) == 3
    assert all(len(after.token(name)) >= 43 for name in ("operator", "reader"))  # 256 bits


def test_all_tokens_of_a_role_are_accepted_and_the_first_is_presented(tmp_path: Path) -> None:
    path = tmp_path / "credentials"
    path.write_text("# who reads\nreader new\nreader old\n\noperator boss\n")
    known = Credentials(path)
    assert [known.role(token) for token in ("new", "old", "boss", "", "wrong", "reader", "ünknown")] == [
        *("reader", "reader", "operator"),
        *[None] * 4,
    ]
    assert known.token("reader") == "new"
    with pytest.raises(ConfigError, match="no line for 'scorer'"):
        known.token("scorer")
    assert known.make_token_source("scorer") is None


def test_a_deleted_line_is_revoked_at_once_and_a_gone_file_all(tmp_path: Path) -> None:
    path = tmp_path / "credentials"
    path.write_text("reader one\noperator two\n")
    known = Credentials(path)
    path.write_text("operator two\n")
    assert (known.role("one"), known.role("two")) == (None, "operator")
    path.unlink()
    assert known.role("two") is None
    path.write_text("operator\n")
    assert known.role("two") is None
    path.write_text("operator three\n")
    assert (known.role("two"), known.role("three")) == (None, "operator")


def test_law_6_while_its_file_is_replaced_a_caller_presents_its_token(tmp_path: Path) -> None:
    """Who accepts tokens accepts none meanwhile."""
    path = tmp_path / "credentials"
    path.write_text("reader one\nscorer two\n")
    known = Credentials(path)
    reader, scorer = known.make_token_source("reader"), known.make_token_source("scorer")
    assert reader is not None
    assert scorer is not None
    path.unlink()
    assert (reader(), scorer(), known.role("one")) == ("one", "two", None)
    for half in ("", "reader\n", "reader thr"):
        path.write_text(half)
        assert scorer() == "two"
    path.write_text("scorer four\nreader three\n")
    assert (reader(), scorer(), known.role("one"), known.role("three")) == ("three", "four", None, "reader")


@pytest.mark.parametrize("half", [b"reader x\noper", "reader x\nenvironment spiel\u00e4".encode()[:-1]])
def test_law_6_half_a_file_may_be_a_whole_one_later(tmp_path: Path, half: bytes) -> None:
    path = tmp_path / "credentials"
    path.write_bytes(half)
    with pytest.raises(ConfigError) as refused:
        Credentials(path)
    assert is_outage(refused.value)


@pytest.mark.parametrize("text", ["operator\n", "operator tökén\n"])
def test_a_line_that_is_none_is_named_without_what_it_says(tmp_path: Path, text: str) -> None:
    path = tmp_path / "credentials"
    path.write_text(f"reader x\n{text}")
    with pytest.raises(ConfigError, match="line 2") as refused:
        Credentials(path)
    assert "tökén" not in str(refused.value)


def test_a_run_has_a_token_for_each_environment_and_server_user() -> None:
    config = config_of(None, env={"math": {"type": "math"}, "mine": {"target": "127.0.0.1:50400"}})
    assert list_roles(config, redis=False) == ["operator", "reader", "scorer", "environment mine"]
    assert list_roles(config, redis=True)[4:] == [f"redis {role}" for role in REDIS_ROLES]


def test_a_run_with_episodes_has_a_token_for_who_asks_for_them() -> None:
    config = config_of(None, env={"mine": {"attached": True, "episodes": True}})
    assert list_roles(config, redis=False) == ["operator", "reader", "scorer", "agents", "environment mine"]
    assert "agents" in assign_roles(config)["reward"]


def test_each_role_has_its_own_login_at_the_buffers_server(tmp_path: Path) -> None:
    path = tmp_path / "credentials"
    path.write_text("operator x\n")
    assert buffer_url(config_of(None), "trainer") == "redis://127.0.0.1:6390/0"
    assert buffer_url(config_of(path), "trainer") == "redis://127.0.0.1:6390/0"
    path.write_text("redis trainer p/w\n")
    assert buffer_url(config_of(path), "trainer") == "redis://adder-trainer:p%2Fw@127.0.0.1:6390/0"
    external = {"redis_url": "rediss://redis:6379/0?ssl_ca_certs=ca.pem"}
    assert buffer_url(config_of(path, replay=external), "trainer") == (
        "rediss://adder-trainer:p%2Fw@redis:6379/0?ssl_ca_certs=ca.pem"
    )
    assert buffer_url(config_of(path, replay={"redis_url": "redis://me:own@redis/0"}), "trainer") == (
        "redis://me:own@redis/0"
    )
    with pytest.raises(ConfigError, match="no line for 'redis rollout'"):
        buffer_url(config_of(path), "rollout")
