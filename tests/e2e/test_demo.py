"""The demo's pipeline as a person starts it, with the reward of their own that the quickstart shows, shortened: it learns, what it leaves
behind obeys the laws, and its checkpoint is of use."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from prometheus_client import generate_latest
from transformers import AutoModelForCausalLM, AutoTokenizer

import headrace_services.agents.metrics  # noqa: F401  # registers those of episodes
from headrace.config import load
from headrace.run.journal import surviving
from tests.support.collector import Received, collecting
from tests.support.command import headrace, headrace_process
from tests.support.finished_run import audit, journal
from tests.support.light_services import instead_of
from tests.support.metrics import expressions, families, names_in, pages, reader_token, scrape
from tests.support.ports import free_ports
from tests.support.processes import descendants, gone
from tests.support.shells import LOUD
from tests.support.up import DEMO, ROOT, Up, demo_arguments
from tests.support.waiting import wait_until

SUM = [{"role": "user", "content": "47+21"}]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def own_reward(folder: Path) -> list[str]:
    """What the quickstart's "Your own reward" changes in the demo: writes its file into `folder`, runs what comes before `headrace up`,
    in the order in which it stands there, and returns the arguments of `up`."""
    text = (ROOT / "docs" / "quickstart.md").read_text().split("## Your own reward")[1].split("\n## ")[0]
    (name,) = re.findall(r"`(\w+\.py)`:\n\n```python", text)
    (folder / name).write_text(re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0])
    (folder / "examples").symlink_to(ROOT / "examples")
    *before, last = [shlex.split(line) for line in re.findall(r"```sh\n(.*?)```", text, re.DOTALL)[0].splitlines()]
    for command in before:
        assert command[0] == "headrace"
        subprocess.run([sys.executable, "-m", "headrace.cli", *command[1:]], cwd=folder, check=True)
    assert last[:3] == ["headrace", "up", str(DEMO.relative_to(ROOT))]
    return last[3:]


def leftovers(folder: Path) -> list[str]:
    """Processes that still belong to the run: their command line names its folder."""
    mine = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = " ".join(process.info["cmdline"] or [])
        if str(folder) in words and process.info["status"] != psutil.STATUS_ZOMBIE and process.pid != os.getpid():
            mine.append(words)
    return mine


STEPS = 10


@dataclasses.dataclass(frozen=True)
class Demo:
    """A finished run: its folder, what it was started with, what its first start, which was killed, and its second one said, and what
    they left behind. `metrics` is what the services of the first one showed to Prometheus, `spans` what the second one exported."""

    folder: Path
    arguments: list[str]
    said_first: str
    said: str
    left: list[str]
    metrics: str
    spans: list[Received]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory, warm_model: Path) -> Demo:
    """The demo, killed in the middle of training and then finished. The reward is that of the quickstart's own environment, the validation
    accuracy that of the built-in one. What is killed was started as a person starts it, in a hostile shell; later, trainer and replica
    are forked, which spares half of what a start takes."""
    place = tmp_path_factory.mktemp("runs")
    # a third of the demo's steps and half of its prompts, at three times its rate
    shortened = (
        "policy.optimizer.kwargs.lr=3e-4",
        "grpo.num_prompts_per_step=16",
        "grpo.val_period=0",
        "checkpointing.save_period=2",
    )
    arguments = demo_arguments(place, warm_model, *shortened)
    arguments += own_reward(place)
    environ = {**os.environ, **LOUD.environ(place)}
    first = Up(DEMO, *arguments, output=place / "first.out", environ=environ, cwd=place, before=LOUD.before)
    try:
        first.wait_for("step 2:")
        token = reader_token(place / "demo")
        shown = "".join(scrape(address, token) for address in pages(first.said()).values())
    finally:
        left = first.stop(signal.SIGKILL)
    left += leftovers(place)

    arguments += [f"grpo.max_num_steps={STEPS}", "page.port=null"]
    with collecting() as collector:
        traced = instead_of(place / "services") | collector.variables
        second = Up(DEMO, *arguments, output=place / "second.out", cwd=place, environ=traced)
        assert second.process.wait(timeout=500) == 0, second.said()
    left += leftovers(place)
    return Demo(place / "demo", arguments, first.said(), second.said(), left, shown, collector.spans)


def test_dashboard_and_alerts_read_what_services_show(demo: Demo) -> None:
    """The demo has no runner of episodes; a slow weight channel is shown only where there is one."""
    of_episodes = families(generate_latest().decode())
    assert "headrace_agents_episodes_open" in of_episodes
    known = families(demo.metrics) | of_episodes | {"headrace_trainer_weight_channel_alarm"}
    missing = {asker: names_in(asked) - known for asker, asked in expressions().items() if names_in(asked) - known}
    assert missing == {}


def test_the_demo_learns_and_keeps_its_laws_though_it_is_killed(demo: Demo) -> None:
    """SIGKILL of the supervisor in the middle of training leaves no orphan; `up` with the same id then finishes the run."""
    run = demo.folder
    assert demo.left == []
    lines = surviving(journal(run))
    assert any(line.kind == "rewind" and line.step >= 2 for line in journal(run)), "it went on from a checkpoint"
    accuracy = {line.step: line.metrics["accuracy"] for line in lines if "accuracy" in line.metrics}  # else abandoned
    assert accuracy[0] <= 0.5
    assert accuracy[STEPS] >= accuracy[0] + 0.25
    audit(load(DEMO, demo.arguments), STEPS)
    assert (run / "curve.png").stat().st_size > 1000


def test_a_trained_group_is_one_trace_from_its_prompt_to_its_step(demo: Demo) -> None:
    config = load(DEMO, demo.arguments)
    n = config.algorithm.num_generations_per_prompt
    steps = {span.id: span for span in demo.spans if span.name == "step"}
    states = ["queued", "generating", "scoring", "ready", "reserved"]
    expected = {
        **{(state, "group"): 1 for state in states},
        ("generate", "generating"): n,
        ("score", "group"): n,
        ("environment", "score"): n,
    }
    whole = 0
    for group in (span for span in demo.spans if span.name == "group" and span["end"] == "trained"):
        trace = [span for span in demo.spans if span.id.trace == group.id.trace]
        names = {span.id: span.name for span in trace}
        parents = Counter((span.name, names.get(span.parent)) for span in trace if span is not group)
        if parents != expected:
            continue  # the first start had it too, or some of it was generated or scored again
        whole += 1
        services = {span.name: span.service for span in trace}
        assert services == {
            **dict.fromkeys(["group", *states], "headrace-trainer"),
            "generate": "headrace-rollout",
            "score": "headrace-replay",
            "environment": "headrace-reward",
        }
        (reserved,) = (span for span in trace if span.name == "reserved")
        (step,) = (steps[link] for link in reserved.links)
        (train,) = (span for span in demo.spans if span.name == "train" and span.parent == step.id)
        assert group.id in train.links
        assert step["step"] == group["step"] == reserved["step"]
    assert whole
    received = [span for span in demo.spans if span.name == "receive_weights"]
    epochs = {span.id for span in demo.spans if span.name == "epoch"}
    assert received
    assert all(span.parent in epochs for span in received)
    told = next(span for span in demo.spans if span.name == "generate").attributes
    assert told["gen_ai.usage.completion_tokens"] > 0
    assert told["gen_ai.latency.time_to_first_token"] > 0


def test_it_begins_in_a_hostile_shell_as_in_any_other(demo: Demo) -> None:
    assert "restarting" not in demo.said_first
    assert [line.step for line in journal(demo.folder) if line.kind == "train"][:3] == [0, 1, 2]


def test_its_last_start_says_where_it_went_on_and_ends_with_its_table(demo: Demo) -> None:
    newest = demo.folder / "checkpoints" / f"step_{STEPS}" / "policy"
    assert re.search(r"continues from checkpoint \d ", demo.said)
    assert f"changed: grpo.max_num_steps: 30 -> {STEPS}" in demo.said
    assert "step 0: reward" not in demo.said, "what an earlier start trained is no news"
    assert f"step {STEPS - 1}: reward" in demo.said
    assert "left out: " in demo.said
    assert f"steps: {STEPS} (grpo.max_num_steps)" in demo.said
    assert "validation accuracy" in demo.said
    assert f"best:           {newest} (val:accuracy" in demo.said
    assert f"headrace samples {demo.folder}" in demo.said
    assert str(newest) in demo.said.splitlines()[-1]
    assert '"state":"finished"' in (demo.folder / "run.json").read_text()
    logs = {path.name for path in (demo.folder / "logs").iterdir()}
    assert logs >= {"replay.log", "reward.log", "rollout-1.log", "trainer.log"}


def exported(demo: Demo, folder: Path) -> str:
    """Its best checkpoint goes to `folder`; returns what transformers answers to `SUM` with it."""
    done = headrace("export", f"{demo.folder}@best", "-o", folder)
    assert done.returncode == 0, done.stderr
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(SUM, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    answer: str = tokenizer.decode(model.generate(prompt, max_new_tokens=6, do_sample=False)[0, prompt.shape[1] :])
    assert answer.endswith(tokenizer.eos_token)
    return answer.removesuffix(tokenizer.eos_token)


def test_its_checkpoint_is_exported_and_evaluated(demo: Demo, tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    assert exported(demo, tmp_path / "adder").isdecimal()
    sums = tmp_path / "sums.jsonl"
    sums.write_text("".join(json.dumps({"input": f"4{i}+3", "output": str(43 + i)}) + "\n" for i in range(8)))
    before = {path.name for path in demo.folder.iterdir()}
    evaluated = headrace_process(
        *("eval", demo.folder, "validation", sums, "--samples", 4, "--temperature", 1, "--json", results),
        *("--set", "data.validation.0.size=60"),
        timeout_s=500,
        cwd=demo.folder.parent,  # where the run was started, and its my_env.py is
        environ=instead_of(tmp_path / "services"),
    )
    assert evaluated.returncode == 0, evaluated.stderr
    assert "68 evaluated" in evaluated.stdout
    assert "pass@4" in evaluated.stdout
    found = json.loads(results.read_text())
    assert (found["model"], found["samples"], found["temperature"]) == (f"demo@{STEPS}", 4, 1.0)
    assert {
        name: (each["evaluated"], each["failed"], each["samples"]) for name, each in found["data_sets"].items()
    } == {"validation": (60, 0, 4), "sums": (8, 0, 4)}
    folder = Path(found["folder"])
    assert folder.parent == demo.folder / "evals"
    assert (folder / "logs" / "val_data_step0.jsonl.gz").exists()
    assert {path.name for path in demo.folder.iterdir()} == before | {"evals"}, "the run itself is as it was"
    validation = found["data_sets"]["validation"]
    assert 0.3 < validation["pass_at"]["1"] < validation["pass_at"]["4"] <= 1
    assert validation["pass_at"]["1"] == pytest.approx(validation["reward"]), "the demo's rewards are 0 and 1"
    assert 0 < validation["reward_stderr"] < 0.1
    assert not leftovers(demo.folder)


@pytest.mark.nightly  # the evaluation, above, starts vLLM on this checkpoint; unit tests say how `serve` starts its server and ends it
def test_its_checkpoint_is_served(demo: Demo, tmp_path: Path) -> None:
    with served(demo.folder, tmp_path / "serve.log") as (address, name):
        reply = post(
            f"{address}/v1/chat/completions", {"model": name, "messages": SUM, "max_tokens": 6, "temperature": 0}
        )
    assert name.startswith("demo@")
    assert reply["choices"][0]["message"]["content"] == exported(demo, tmp_path / "adder")
    assert not leftovers(demo.folder)


@pytest.mark.nightly  # `headrace eval`, above, goes the same road
def test_another_reward_is_tried_on_what_its_checkpoint_writes(demo: Demo, tmp_path: Path) -> None:
    file, sums, page = tmp_path / "first_digit.py", tmp_path / "sums.jsonl", tmp_path / "tried.html"
    file.write_text(
        "import headrace\n\nclass FirstDigit(headrace.Environment):\n    def score(self, sample):\n"
        "        return float(sample.completion[:1] == sample.extra_env_info['answer'][:1])\n"
    )
    sums.write_text("".join(json.dumps({"input": f"4{i}+3", "output": str(43 + i)}) + "\n" for i in range(8)))
    before = {path: path.read_bytes() for path in demo.folder.iterdir() if path.is_file()}
    tried = headrace_process(
        *(
            "env",
            "try",
            file,
            "--prompts",
            sums,
            "--model",
            f"{demo.folder}@best",
            "-n",
            4,
            "--first",
            3,
            "--html",
            page,
        ),
        timeout_s=500,
        cwd=demo.folder.parent,
    )
    assert tried.returncode == 0, tried.stderr
    assert "3 prompts, 12 completions: mean reward" in tried.stdout
    assert page.read_text().count("<article") == 12
    assert {path: path.read_bytes() for path in before} == before, "the run itself is as it was"
    assert not leftovers(demo.folder)


@contextlib.contextmanager
def served(run: Path, log: Path) -> Iterator[tuple[str, str]]:
    """`headrace serve` of the run's best checkpoint: its address, and the only model there is."""
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "headrace.cli", "serve", f"{run}@best", "--port", str(port)]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
    address = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        assert process.poll() is None, log.read_text()
        with contextlib.suppress(OSError):
            return bool(urllib.request.urlopen(f"{address}/health", timeout=10).status == 200)
        return False

    try:
        wait_until(answers)
        (model,) = json.load(urllib.request.urlopen(f"{address}/v1/models", timeout=30))["data"]
        yield address, model["id"]
    finally:
        started = descendants(process.pid)
        process.terminate()
        process.wait(timeout=120)
    assert all(gone(pid) for pid in started)


def post(url: str, body: dict[str, Any]) -> Any:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers, method="POST")
    return json.load(urllib.request.urlopen(request, timeout=120))
