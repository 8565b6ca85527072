"""Run ids, the saved configuration, and ports."""

from __future__ import annotations

import contextlib
import datetime
import shutil
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.base.addresses import LOOPBACK
from headrace.base.errors import ConfigError, ServiceError
from headrace.cli import services
from headrace.cli.app import app
from headrace.cli.up import nothing_left
from headrace.config import Config, load
from headrace.launch import ports, runs
from headrace.net import rpc
from headrace.net.service import bind, pass_sockets
from headrace.run import history
from headrace.run.history import RECORD, recorded
from headrace.run.journal import JOURNAL, Journal
from tests.support.past_run import Stopped, past_run
from tests.support.ports import free_port

AT = datetime.datetime(2026, 1, 2, 3, 4, 5)


@pytest.mark.parametrize(
    ("name", "stem"),
    [("adder.yaml", "adder"), ("my run (2).yaml", "my-run-2-"), ("_.yaml", "run"), ("x" * 99, "x" * 48)],
)
def test_an_id_comes_from_the_file_and_the_time(name: str, stem: str) -> None:
    run_id = runs.new_id(Path(name).stem, AT)
    assert run_id == f"{stem}-20260102-030405"
    assert Config.model_validate({"run": {"id": run_id}}).run.id == run_id


def test_runs_that_start_in_one_second_have_folders_of_their_own(tmp_path: Path) -> None:
    def new() -> contextlib.AbstractContextManager[str]:
        return runs.new_folder(tmp_path / "runs", "adder", AT)

    with new() as first, new() as second:
        assert (first, second) == ("adder-20260102-030405", "adder-20260102-030405-2")
        (tmp_path / "runs" / second / "something").touch()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [second]


@pytest.mark.parametrize("removed", [False, True])
def test_a_start_that_writes_nothing_leaves_no_folder(tmp_path: Path, removed: bool) -> None:
    with runs.new_folder(tmp_path / "runs", "adder", AT) as run_id:
        if removed:  # by one who has written something
            (tmp_path / "runs" / run_id).rmdir()
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("kind", ["file", "link"])
def test_runs_need_a_folder_that_is_there(tmp_path: Path, kind: str) -> None:
    # a link to a disk that is away exists, and no folder can be made in its place
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "away" / "runs")
    with pytest.raises(ServiceError, match=kind), runs.new_folder(tmp_path / kind, "adder", AT):
        pass


def test_a_run_goes_on_with_what_may_change(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"run: {{id: adder, dir: {tmp_path}}}\n")
    saved = runs.save(load(file, environ={}))
    assert saved == tmp_path / "adder" / "config.yaml"
    _, changes = runs.prepare(file, ["grpo.max_num_steps=7"])
    assert changes == ["grpo.max_num_steps: 1000000 -> 7"]
    # until something is trained, nothing is fixed: a first start that failed burns no id
    _, changes = runs.prepare(file, ["grpo.seed=7"])
    assert changes == ["grpo.seed: 42 -> 7"]
    journal = Journal(tmp_path / "adder" / JOURNAL)
    journal.append("validation", 0, "a", {})
    runs.prepare(file, ["grpo.seed=7"])
    journal.append("train", 0, "a", {})
    with pytest.raises(ConfigError, match=r"adder(.|\n)*grpo\.seed: 42 -> 7"):
        runs.prepare(file, ["grpo.seed=7"])
    journal.path.unlink()
    checkpoint = tmp_path / "adder" / "checkpoints" / "step_3"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text('{"timeline": "a"}')
    for override in ("grpo.seed=7", f"checkpointing.checkpoint_dir={tmp_path}/elsewhere"):
        with pytest.raises(ConfigError, match="adder has checkpoint 3"):
            runs.prepare(file, ["grpo.seed=7", override])


def test_a_run_goes_on_with_a_data_set_given_by_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_DATA", "{train: {dataset_name: arithmetic, env_name: math, system_prompt: Be brief.}}")
    file = tmp_path / "run.yaml"
    file.write_text(f"run: {{id: adder, dir: {tmp_path}}}\nenv: {{math: {{type: math}}}}\n")
    saved = runs.save(load(file))
    for given in (file, saved):
        config, changes = runs.prepare(given, [])
        assert (config.data.train[0].system_prompt, changes) == ("Be brief.", [])


def test_a_start_that_fails_leaves_no_folder(tmp_path: Path) -> None:
    config = Config.model_validate({"run": {"id": "adder", "dir": str(tmp_path)}})
    with pytest.raises(ServiceError, match="no"), runs.lock(config):
        raise ServiceError("no")
    assert list(tmp_path.iterdir()) == []
    with runs.lock(config):
        runs.save(config)
    assert (tmp_path / "adder" / runs.SAVED).exists()


def failing_start(config: Config, *, goes_on: bool = False) -> None:
    with runs.refusable(config):
        runs.save(config)
        with recorded(config.run_folder, Stopped):
            if goes_on:
                Journal(config.run_folder / JOURNAL).append("rewind", 2, "b", {})
            raise ServiceError("no")


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_start_changes_the_record_only_once_it_goes_on_with_the_run(tmp_path: Path, goes_on: bool) -> None:
    folder = past_run(tmp_path, "adder", 2)
    before = {name: (folder / name).read_bytes() for name in (runs.SAVED, RECORD)}
    config = load(folder / runs.SAVED, ["grpo.max_num_steps=7"], environ={}).relocate(folder)
    with pytest.raises(ServiceError, match="no"):
        failing_start(config, goes_on=goes_on)
    after = {name: (folder / name).read_bytes() for name in (runs.SAVED, RECORD)}
    assert (after == before) is not goes_on
    assert history.read(config).state == ("failed" if goes_on else "finished")


def test_the_first_start_that_fails_says_so(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match="no"):
        failing_start(Config.model_validate({"run": {"id": "adder", "dir": str(tmp_path)}}))
    assert history.read(runs.find(str(tmp_path / "adder"))).reason == "no"


def test_a_folder_is_usable_where_it_is_and_under_its_new_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "run.yaml"
    file.write_text("run: {id: adder}\n")
    config, _ = runs.prepare(file, [])
    with runs.lock(config):
        runs.make_credentials(config)
    runs.save(config)
    shutil.copytree("runs/adder", "runs/copy")
    moved = tmp_path / "moved" / "adder"
    moved.parent.mkdir()
    (tmp_path / "runs" / "adder").rename(moved)
    for named, folder in (("copy", tmp_path / "runs" / "copy"), ("moved/adder", moved)):
        found = runs.find(named)
        assert (found.run.id, found.run_folder) == ("adder", folder)
        assert found.checkpoint_folder == folder / "checkpoints"
        assert found.security.credentials == str(folder / "credentials")
    assert runs.may_be_up(runs.find("moved/adder"))
    assert not runs.may_be_up(runs.find("copy")), "what listens on its ports is the original"


def test_a_renamed_run_does_not_go_on_and_no_other_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "run.yaml"
    file.write_text("run: {id: adder}\n")
    runs.save(load(file, environ={}))
    with recorded(Path("runs/adder"), Stopped):
        pass
    renamed = Path("runs/adder").rename("runs/first")
    for given in ((renamed / runs.SAVED, []), (file, ["run.id=first"])):
        with pytest.raises(ConfigError, match=r"first.*run adder.*rename.*to adder"):
            runs.prepare(*given)
    assert runs.prepare(renamed / runs.SAVED, ["run.id=second"])[0].run.id == "second"


def test_what_a_run_saved_holds_from_every_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative paths are those of the folder where it was started, also when that was moved as a whole."""
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    for folder in (project, elsewhere):
        (folder / "models" / "tiny").mkdir(parents=True)
        (folder / "my_env.py").touch()
    (project / "run.yaml").write_text(
        "run: {id: adder}\npolicy: {model_name: models/tiny}\nenv: {mine: {target: 'my_env.py:Mine'}}\n"
        "security: {tls_ca: models}\n"
    )
    monkeypatch.chdir(project)
    runs.save(load("run.yaml", environ={}))

    def paths(config: Config) -> tuple[str | None, ...]:
        return config.policy.model_name, config.env["mine"].target, config.security.tls_ca

    assert paths(runs.find("adder")) == ("models/tiny", "my_env.py:Mine", "models")
    start = project.rename(tmp_path / "moved")
    monkeypatch.chdir(elsewhere)
    folder = start / "runs" / "adder"
    found = runs.find(str(folder))
    assert paths(found) == (f"{start}/models/tiny", f"{start}/my_env.py:Mine", f"{start}/models")
    assert (found.run.started_in, found.run_folder) == (None, folder)
    # what is given here is meant here
    assert runs.find(str(folder), ["policy.model_name=models/tiny"]).policy.model_name == "models/tiny"
    # it goes on in its folder, and is no other when it is started where it was
    Journal(folder / JOURNAL).append("train", 0, "a", {})
    config, changes = runs.prepare(folder / runs.SAVED, [])
    assert (config.run_folder, changes) == (folder, [])
    runs.save(config)
    monkeypatch.chdir(start)
    assert runs.prepare(Path("run.yaml"), [])[1] == []
    # where its folder was moved to, it goes on as well
    archived = folder.rename(start / "adder")
    assert runs.prepare(archived / runs.SAVED, [])[0].run_folder == archived


def test_a_trainer_that_nobody_supervises_saves_its_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"run: {{id: adder, dir: {tmp_path}}}\n")
    # a trainer that ends at once: what it would do is not asked here, and to load it takes longer than all else
    monkeypatch.setattr(services, "load_entry_point", lambda *_, **__: lambda config: None)
    done = CliRunner().invoke(app, ["trainer", "--config", str(file), "grpo.seed=7"])
    assert done.exception is None
    saved = runs.find(str(tmp_path / "adder"))
    assert (saved.run.id, saved.grpo.seed) == ("adder", 7)
    # started with what is saved, it writes nothing of it
    place = tmp_path / "adder" / runs.SAVED
    before = place.stat().st_mtime_ns
    with runs.unsupervised(load(place, environ={}), place):
        assert place.stat().st_mtime_ns == before
    (tmp_path / "no").write_text("")
    nowhere = load(file, ["run.dir=" + str(tmp_path / "no")], environ={})
    with pytest.raises(ServiceError, match=r"run\.dir: can't write"), runs.unsupervised(nowhere, file):
        pass


def test_what_is_saved_is_for_its_owner_alone(tmp_path: Path) -> None:
    run = {"id": "x", "dir": str(tmp_path)}
    saved = runs.save(Config.model_validate({"run": run}))
    assert stat.S_IMODE(saved.stat().st_mode) == 0o600


def test_a_run_has_credentials_in_its_folder_and_keeps_them(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"run: {{id: adder, dir: {tmp_path}}}\n")
    config, _ = runs.prepare(file, [])
    with runs.lock(config):
        runs.make_credentials(config)
    assert stat.S_IMODE(config.run_folder.stat().st_mode) == 0o700
    path = Path(config.security.credentials or "")
    assert path == tmp_path / "adder" / "credentials"
    before = path.read_text()
    with runs.lock(config):
        runs.make_credentials(config)
    assert path.read_text() == before
    runs.save(config)
    assert not any(line.split()[-1] in (path.parent / runs.SAVED).read_text() for line in before.splitlines())
    given, _ = runs.prepare(file, [f"security.credentials={tmp_path}/mine"])
    assert given.security.credentials == f"{tmp_path}/mine"


def test_ports_that_others_must_know_are_settled() -> None:
    values = {"port": 0}
    config = Config.model_validate(
        {"replay": {**values, "redis_url": "redis://x"}, "reward": {**values, "http_port": 0}, "trainer": values}
    )
    with ports.settle(config) as (settled, _):
        chosen = {settled.replay.port, settled.reward.port, settled.reward.http_port, settled.trainer.port}
    assert len(chosen) == 4
    assert 0 not in chosen


def test_a_variable_behind_a_fixed_key_may_not_change_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HR_PROMPT", "canary-one")
    file = tmp_path / "run.yaml"
    file.write_text(f"run: {{id: adder, dir: {tmp_path}}}\n")
    given = ["env.judge={type: verifiers, python: x, verifiers: {taskset: {id: a, key: '${oc.env:HR_PROMPT}'}}}"]
    config, _ = runs.prepare(file, given)
    assert "canary" not in runs.save(config).read_text()
    Journal(config.run_folder / JOURNAL).append("train", 0, "a", {})
    assert runs.prepare(file, given)[1] == []
    monkeypatch.setenv("HR_PROMPT", "canary-two")
    with pytest.raises(ConfigError, match=r"keys changed[^\n]*\n  run\.from_environment") as refused:
        runs.prepare(file, given)
    assert "canary" not in str(refused.value)


def chosen_ports(config: Config) -> list[int]:
    services = (config.replay.port, config.replay.redis_port, config.reward.port, config.reward.http_port)
    return [*services, config.trainer.port, config.env["mine"].port]


async def test_a_port_that_was_chosen_is_its_services_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config.model_validate({"env": {"mine": {"target": "my_env.py:Mine"}}})

    def steal() -> None:
        """Neither before the service listens, nor while it does or is restarted."""
        for port in chosen_ports(settled):
            for reuse in (False, True):
                with socket.socket() as thief:
                    thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
                    with pytest.raises(OSError, match="in use"):
                        thief.bind((LOOPBACK, port))

    with ports.settle(config) as (settled, reserved):
        steal()
        with pytest.raises(ServiceError, match="can't listen"):
            bind(LOOPBACK, settled.replay.port, "port")
        for name, value in pass_sockets(reserved.values()).items():
            monkeypatch.setenv(name, value)
        for port in (settled.replay.port, settled.reward.http_port, settled.trainer.port):
            for _ in range(2):
                with bind(LOOPBACK, port, "port"):
                    steal()
                steal()
        for port in (settled.reward.port, settled.env["mine"].port):
            server = rpc.server()
            assert rpc.listen(server, LOOPBACK, port, "port") == port
            await server.start()
            steal()
            await server.stop(None)
            steal()
    with socket.socket() as other:
        other.bind((LOOPBACK, settled.replay.port))


def test_two_runs_have_ports_of_their_own_unless_they_are_given(tmp_path: Path) -> None:
    port = free_port()
    file = tmp_path / "run.yaml"
    own = "env: {mine: {target: 'my_env.py:Mine'}}"
    file.write_text(f"run: {{id: adder, dir: {tmp_path}}}\nreplay: {{port: {port}}}\n{own}\n")
    config, _ = runs.prepare(file, [])
    with ports.settle(config) as (first, _), ports.settle(Config()) as (second, _):
        pass
    assert first.replay.port == port
    chosen = [
        value
        for settled in (first, second)
        for value in (settled.replay.redis_port, settled.reward.port, settled.reward.http_port, settled.trainer.port)
    ]
    assert len({*chosen, port, second.replay.port}) == 10
    assert not {6390, 8390, 50390} & set(chosen)
    # they are no change of the run's, and are found through its folder
    runs.save(first)
    assert runs.prepare(file, [])[1] == []
    assert runs.find(str(tmp_path / "adder")).reward.port == first.reward.port


def test_the_busy_port_of_an_environment_is_found_as_the_others_are() -> None:
    with socket.create_server((LOOPBACK, 0)) as taken:
        config = Config.model_validate({"env": {"mine": {"target": "my_env.py:Mine", "port": taken.getsockname()[1]}}})
        assert [line for line in ports.list_busy(config) if line.startswith("env.mine.port")]


def test_a_busy_port_says_which_run_has_it(tmp_path: Path) -> None:
    saved = tmp_path / "runs" / "adder" / "config.yaml"
    listen = "import socket, sys; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", listen, "--config", str(saved)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        config = Config.model_validate({"replay": {"port": int(process.stdout.readline())}})
        who = rf"; process {process.pid} has it, of run adder in {saved.parent}"
        with pytest.raises(ServiceError, match=rf"replay\.port: can't listen on .*{who}$"), ports.settle(config):
            pass
        assert [line for line in ports.list_busy(config) if line.endswith(who)]
        assert process.stdin is not None
        process.stdin.close()
    assert ports.list_busy(config) == []


@pytest.mark.parametrize(
    ("steps", "planned", "state", "left"),
    [(4, 4, "finished", False), (4, 3, "finished", False), (4, 5, "finished", True), (4, 4, "stopped", True)],
)
def test_a_run_that_has_finished_is_not_started_for_nothing(
    tmp_path: Path, steps: int, planned: int, state: str, left: bool
) -> None:
    folder = past_run(tmp_path, "adder", steps)
    record = (folder / RECORD).read_text()
    (folder / RECORD).write_text(record.replace("finished", state))
    checkpoint = folder / "checkpoints" / f"step_{steps}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text('{"timeline": "a"}')
    config = Config.model_validate({"run": {"id": "adder", "dir": str(tmp_path)}, "grpo": {"max_num_steps": planned}})
    assert (nothing_left(config) is None) == left


def test_a_run_that_was_never_started_has_everything_left(tmp_path: Path) -> None:
    assert nothing_left(Config.model_validate({"run": {"id": "adder", "dir": str(tmp_path)}})) is None
