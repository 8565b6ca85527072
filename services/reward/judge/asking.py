"""Asks judges over HTTP, within the run's budget, and remembers what they answered."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import sqlite3
import time
from http import HTTPStatus
from pathlib import Path

import msgspec
import prometheus_client

from headrace.base.addresses import find_proxy, url_through_proxy
from headrace.base.backoff import pause_after
from headrace.base.errors import UnusableFile
from headrace.base.http_client import AnswerTooLarge, HttpAnswer, HttpClient, NotReached
from headrace.base.tasks import cancel
from headrace.base.tls import client_context
from headrace.config.environments import JudgeConfig, LLMJudgeConfig

from .questions import Question, make_request
from .template import JudgeTemplate
from .verdicts import (
    NoVerdict,
    Scale,
    Usage,
    Verdict,
    excerpt,
    read_completion,
    verdict_in,
)

_MAX_ANSWER_BYTES = 256 * 1024
# Statuses of an overloaded judge: neither the completion nor this request is at fault.
_OVERLOADED = (429, 502, 503, 504)
# The least pauses before such a judge is asked again, however little it states.
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.05, 5.0

REQUESTS = prometheus_client.Counter(
    "headrace_judge_requests", "Requests sent to judges, by how they ended", ["environment", "model", "outcome"]
)
TOKENS = prometheus_client.Counter(
    "headrace_judge_tokens",
    "Tokens that judges read (prompt) and wrote (completion), as their endpoints count them",
    ["environment", "model", "kind"],
)


class NotNow(Exception):
    """Raised when the judge was not asked, or did not start."""


class Late(Exception):
    """Raised when the judge had not answered completely in time."""


class VerdictStore:
    """The verdicts of an environment's judges, by the content of the request, and the number of requests. Both count for the whole run, in
    every process. Without a file, the store is in memory."""

    def __init__(self, path: Path | None) -> None:
        """Open the store. Raises `ConfigError` for a file that can't be used."""
        try:
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(path or ":memory:", isolation_level=None)
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute("PRAGMA synchronous=NORMAL")
            self._database.execute("CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, verdict BLOB)")
            self._database.execute("CREATE TABLE IF NOT EXISTS requests (sent INTEGER)")
        except (sqlite3.Error, OSError) as error:
            raise UnusableFile(
                f"{path}: the judges' verdicts can't be stored there ({error}); repair or delete the file"
            ) from error

    def verdict(self, key: str) -> Verdict | None:
        row = self._database.execute("SELECT verdict FROM answers WHERE key = ?", (key,)).fetchone()
        return None if row is None else msgspec.json.decode(row[0], type=Verdict)

    def keep(self, key: str, verdict: Verdict) -> None:
        row = key, msgspec.json.encode(verdict)
        self._database.execute("INSERT OR REPLACE INTO answers (key, verdict) VALUES (?, ?)", row)

    @property
    def sent(self) -> int:
        return int(self._database.execute("SELECT COALESCE(SUM(sent), 0) FROM requests").fetchone()[0])

    def send(self) -> None:
        """Count a request. Call this before sending it."""
        if self._database.execute("UPDATE requests SET sent = sent + 1").rowcount == 0:
            self._database.execute("INSERT INTO requests VALUES (1)")

    def close(self) -> None:
        self._database.close()


class Judges:
    """The judges of one environment."""

    def __init__(self, name: str, env: LLMJudgeConfig, template: JudgeTemplate | None, store: VerdictStore) -> None:
        """Raises `ConfigError` for a judge's file that can't be used."""
        self._name, self._env, self._template, self._store = name, env, template, store
        self._scale = Scale(*env.scale)
        self._asking: dict[str, asyncio.Task[Verdict]] = {}  # requests under way, by their key
        self._clients = [
            HttpClient(
                judge.base_url,
                client_context(judge.tls_ca, "judges.tls_ca") if judge.base_url.startswith("https:") else None,
                most=_MAX_ANSWER_BYTES,
                connect_s=env.timeout_s / 2,  # not reached in this time: nothing is charged
                total_s=env.timeout_s,
                connections=env.concurrency,
                proxy=find_proxy(judge.base_url),
            )
            for judge in env.judges
        ]
        for judge in env.judges:
            _headers(judge)

    def name(self, place: int) -> str:
        """Return how messages name a judge."""
        judge = self._env.judges[place]
        return f"judge {place} ({judge.model} at {judge.base_url})"

    def is_asked(self, place: int, number: int, question: Question) -> bool:
        """Whether an answer is awaited."""
        return self._key(place, number, question) in self._asking

    async def ask(self, place: int, number: int, question: Question) -> Verdict:
        """Return the verdict of one judge, its sample `number`: from an earlier request with the same content, one under way, or a new one.
        A request continues even if nobody waits for it any more, because it has been paid for. Raises `NotNow`, `Late`, `NoVerdict`,
        `TemplateFails`."""
        key = self._key(place, number, question)
        if (known := self._store.verdict(key)) is not None:
            return known
        if key not in self._asking:
            request = make_request(self._env.judges[place], self._env, self._template, question, number)
            self._asking[key] = asyncio.create_task(self._ask(place, key, question, json.dumps(request).encode()))
            self._asking[key].add_done_callback(lambda task: self._done(key, task))
        return await asyncio.shield(self._asking[key])

    async def aclose(self) -> None:
        await cancel(self._asking.values())
        for client in self._clients:
            await client.aclose()
        self._store.close()

    def _done(self, key: str, task: asyncio.Task[Verdict]) -> None:
        del self._asking[key]
        if not task.cancelled():
            task.exception()  # mark the error as retrieved: those that wait get it, and if nobody waits it doesn't matter

    def _key(self, place: int, number: int, question: Question) -> str:
        judge, env = self._env.judges[place], self._env
        asked = [
            judge.base_url,
            judge.model,
            judge.temperature,
            judge.max_tokens,
            judge.seed,
            number,
            env.rubric,
            env.template,
            env.scale,
            question.kind,
            question.text,
        ]
        return hashlib.sha256(json.dumps(asked).encode()).hexdigest()

    async def _ask(self, place: int, key: str, question: Question, request: bytes) -> Verdict:
        try:
            async with asyncio.timeout(self._env.timeout_s):
                verdict = await self._verdict(place, question, request)
        except TimeoutError as error:
            raise Late(
                f"gave no complete answer within {self._env.timeout_s:g} s (env.{self._name}.timeout_s)"
            ) from error
        self._store.keep(key, verdict)
        return verdict

    async def _verdict(self, place: int, question: Question, request: bytes) -> Verdict:
        """Ask until there is a verdict, at most `retries` times more."""
        for tries in range(self._env.retries + 1):
            answer = await self._answer(place, request)
            try:
                completion = read_completion(answer.body)
                self._count_tokens(place, completion.usage)
                verdict = verdict_in(completion, self._scale, question.kind, question.count)
            except NoVerdict as error:
                self._count(place, "no_verdict")
                if tries == self._env.retries:
                    raise NoVerdict(f"{error}" + (f" (asked {tries + 1} times)" if tries else "")) from error
            else:
                self._count(place, "verdict")
                return verdict
        raise AssertionError("unreachable")

    async def _answer(self, place: int, request: bytes) -> HttpAnswer:
        """Return an answer of a judge that has room. One that says when it will is asked again then, if there is time."""
        deadline = time.monotonic() + self._env.timeout_s
        for tries in itertools.count(1):
            answer = await self._send(place, request)
            if answer.status == HTTPStatus.OK:
                return answer
            message = f"answered {answer.status}: {excerpt(answer.body)}"
            if answer.status not in _OVERLOADED:
                self._count(place, "refused")
                raise NoVerdict(message)
            self._count(place, "overloaded")
            stated_s = read_seconds(answer.headers.get("retry-after"))
            # one that says 0 each time would use up the budget
            pause_s = max(stated_s or 0.0, pause_after(tries, _FIRST_PAUSE_S, _LAST_PAUSE_S))
            if stated_s is None or time.monotonic() + pause_s >= deadline:
                raise NotNow(message)
            await asyncio.sleep(pause_s)
        raise AssertionError("unreachable")

    async def _send(self, place: int, request: bytes) -> HttpAnswer:
        judge = self._env.judges[place]
        if self._env.budget is not None and self._store.sent >= self._env.budget:
            raise NotNow(
                f"env.{self._name}.budget {self._env.budget} is used up: the run has sent that many requests to its judges; raise it and "
                "restart the reward service"
            )
        self._store.send()
        try:
            return await self._clients[place].send("/chat/completions", _headers(judge), request)
        except NotReached as error:
            self._count(place, "unreachable")
            raise NotNow(f"can't be reached ({error}{url_through_proxy(judge.base_url)})") from error
        except AnswerTooLarge as error:
            self._count(place, "no_verdict")
            raise NoVerdict(f"answered more than {_MAX_ANSWER_BYTES} bytes") from error
        except TimeoutError:
            self._count(place, "late")
            raise
        except OSError as error:
            self._count(place, "no_answer")
            raise NoVerdict(f"gave no answer ({error})") from error
        except asyncio.CancelledError:  # by the time limit of all tries, or by the end of the service
            self._count(place, "late")
            raise

    def _count(self, place: int, outcome: str) -> None:
        REQUESTS.labels(self._name, self._env.judges[place].model, outcome).inc()

    def _count_tokens(self, place: int, usage: Usage | None) -> None:
        if usage is not None:
            for kind, count in (("prompt", usage.prompt_tokens), ("completion", usage.completion_tokens)):
                TOKENS.labels(self._name, self._env.judges[place].model, kind).inc(max(0, count))


def read_seconds(text: str | None) -> float | None:
    """Return the seconds of a header Retry-After; None if it has none, or a date."""
    return float(text) if text is not None and text.isascii() and text.isdigit() else None


def _headers(judge: JudgeConfig) -> dict[str, str]:
    """Return the headers of a request. The key is read again for each request, so that it can be replaced. Raises `ConfigError`."""
    if judge.api_key_file is None:
        return {}
    try:
        key = Path(judge.api_key_file).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UnusableFile(
            f"judges.api_key_file {judge.api_key_file} can't be read ({error}); give a file that holds only the key"
        ) from error
    if not key or not key.isprintable():  # HTTP has no header with a line break
        held = "several lines, or control characters" if key else "nothing"
        raise UnusableFile(
            f"judges.api_key_file {judge.api_key_file} holds {held}; give a file that holds only the key"
        )
    return {"Authorization": f"Bearer {key}"}
