"""`headrace certs` and `headrace credentials`: what they write, for whom, and what they keep."""

from __future__ import annotations

import ssl
import stat
from pathlib import Path

import pytest
from cryptography import x509
from typer.testing import CliRunner

from headrace.base.errors import ConfigError
from headrace.cli.app import app
from headrace.net.credentials import Credentials


def run(*words: str | Path) -> str:
    result = CliRunner().invoke(app, list(map(str, words)), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def names_of(path: Path) -> set[str]:
    certificate = x509.load_pem_x509_certificate(path.read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return {*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))}


def test_each_host_has_a_certificate_of_one_authority(tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    run("certs", "--dir", folder, "hub,hub.internal,10.0.0.7", "trainer")
    local = {"localhost", "127.0.0.1", "::1"}
    assert names_of(folder / "hub.pem") == {"hub", "hub.internal", "10.0.0.7"} | local
    assert names_of(folder / "trainer.pem") == {"trainer"} | local
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.glob("*.key")} == {
        f"{name}.key": 0o600 for name in ("ca", "hub", "trainer")
    }
    authority = (folder / "ca.pem").read_bytes()
    run("certs", "--dir", folder, "rollout")
    assert (folder / "ca.pem").read_bytes() == authority
    for name in ("hub", "trainer", "rollout"):
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(folder / f"{name}.pem", folder / f"{name}.key")
        certificate = x509.load_pem_x509_certificate((folder / f"{name}.pem").read_bytes())
        certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(authority))


@pytest.mark.parametrize(("hosts", "said"), [("a,,b", "empty name"), ("bücher", "neither a name")])
def test_a_host_that_is_none_is_named(tmp_path: Path, hosts: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run("certs", "--dir", tmp_path, hosts)


def test_an_authority_without_its_key_is_not_replaced(tmp_path: Path) -> None:
    run("certs", "--dir", tmp_path, "hub")
    (tmp_path / "ca.key").unlink()
    with pytest.raises(ConfigError, match=r"ca\.pem.*ca\.key.*put the key back"):
        run("certs", "--dir", tmp_path, "hub")


def test_each_service_has_a_file_with_what_it_needs_alone(tmp_path: Path) -> None:
    config, folder = tmp_path / "run.yaml", tmp_path / "secrets"
    config.write_text(
        "run: {id: adder}\ncheckpointing: {store: 's3://b/r'}\nenv: {mine: {target: 'mine:50400', episodes: true}}\n"
    )
    run("credentials", config, "--dir", folder)
    whole = Credentials(folder / "credentials")
    assert stat.S_IMODE((folder / "reward.credentials").stat().st_mode) == 0o600
    mine = Credentials(folder / "environment-mine.credentials")
    assert mine.token("environment mine") == whole.token("environment mine")
    rollout = (folder / "rollout.credentials").read_text()
    roles = [line.rpartition(" ")[0] for line in rollout.splitlines()]
    assert roles == ["operator", "reader", "agents", "rollout", "redis rollout"]
    runners = (folder / "agents.credentials").read_text()
    assert [line.rpartition(" ")[0] for line in runners.splitlines()] == [
        "operator",
        "reader",
        "agents",
        "redis agents",
    ]
    for service in ("replay", "reward", "trainer", "rollout", "environment-mine"):
        assert whole.token("redis admin") not in (folder / f"{service}.credentials").read_text()
    before = (folder / "reward.credentials").read_text()
    run("credentials", config, "--dir", folder)
    assert (folder / "reward.credentials").read_text() == before
