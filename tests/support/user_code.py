"""What the code of a user may raise and return, and an environment that does what a sample or an episode asks for."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import headrace
from headrace import Environment, Episode, Sample, Score


class Speechless(Exception):
    def __str__(self) -> str:
        raise SystemExit("no words")


class Torn(Exception):
    def __str__(self) -> str:
        return "half a pair: \ud800"


class Picky(Exception):
    def __init__(self, *, reason: str) -> None:
        super().__init__(reason)


def every(kind: type[BaseException] = BaseException) -> Iterator[type[BaseException]]:
    yield kind
    for below in kind.__subclasses__():
        yield from every(below)


def made(kind: type[BaseException]) -> BaseException:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for arguments in (
            (),
            ("said",),
            ("utf-8", b"\xff", 0, 1, "said"),
            ("utf-8", "x", 0, 1, "said"),
            ("said", [KeyError()]),
        ):
            try:
                error = kind(*arguments)
            except Exception:  # noqa: BLE001
                continue
            if isinstance(error, BaseException):
                return error
    return kind.__new__(kind)


ERRORS = sorted(
    {
        kind
        for kind in every()
        if kind.__module__ == __name__ or kind.__module__.partition(".")[0] in sys.stdlib_module_names
    },
    key=lambda kind: (kind.__qualname__, kind.__module__),
)


def generator() -> Iterator[float]:
    yield 1.0


class Heavy:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __float__(self) -> float:
        raise self.error


class Shy:
    def __float__(self) -> str:
        return "1"

    def __repr__(self) -> str:
        raise SystemExit("not shown")


class Broken:
    def __await__(self) -> Iterator[Any]:
        yield "no future"


class Chameleon:
    @property
    def __class__(self) -> type:
        raise StopIteration


def cyclic() -> dict[str, Any]:
    found: dict[str, Any] = {}
    found["self"] = found
    return found


def of_another_loop() -> asyncio.Future[float]:
    loop = asyncio.new_event_loop()
    future = loop.create_future()
    loop.close()
    return future


VALUES: list[Callable[[], Any]] = [
    lambda: float("nan"),
    lambda: float("inf"),
    lambda: 10**400,
    lambda: 1j,
    lambda: "1",
    lambda: b"1",
    lambda: object(),
    lambda: Shy(),
    lambda: Chameleon(),
    generator,
    lambda: Broken(),
    of_another_loop,
    lambda: Heavy(StopIteration()),
    lambda: Heavy(KeyboardInterrupt()),
    lambda: Heavy(asyncio.CancelledError()),
    lambda: Score("SCORED", 1.0, build="\ud800"),
    lambda: Score("SCORED", 1.0, build=5),
    lambda: Score("SCORED", 1.0, message="\ud800"),
    lambda: Score("SCORED", 1.0, message=5),
    lambda: Score("SCORED", 1.0, {"\ud800": 1.0}),
    lambda: Score("SCORED", 1.0, {5: 1.0}),  # type: ignore[dict-item]
    lambda: Score("SCORED", 1.0, metadata=cyclic()),
    lambda: Score("SCORED", 1.0, metadata={"x": object()}),
    lambda: Score("SCORED", 1.0, metadata={"x": float("nan")}),
    lambda: Score("SCORED", 1.0, metadata=5),
    lambda: Score("SCORED", True and Heavy(ValueError())),
    lambda: Score("PERFECT"),
    lambda: Score(["SCORED"]),
]


def act(asked: str) -> Any:
    verb, _, number = asked.partition(" ")
    match verb:
        case "raise":
            raise made(ERRORS[int(number)])
        case "return":
            return VALUES[int(number)]()
        case "list":  # what it can raise: each process has imported other exceptions
            return Score("SCORED", 1.0, metadata={"errors": [type(made(kind)).__name__ for kind in ERRORS]})
    return 1.0


async def play(episode: Episode) -> Any:
    if episode.public["do"] == "leave":
        asyncio.get_running_loop().call_soon(act, f"raise {ERRORS.index(SystemExit)}")
        await asyncio.Event().wait()
    return act(episode.public["do"])


class Mine(Environment):
    concurrency = episodes = 2

    def score(self, sample: Sample) -> Any:
        return act(sample.completion)

    async def episode(self, episode: Episode) -> Any:
        return await play(episode)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--attach", help="host:port of a hub")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    if arguments.attach is None:
        headrace.serve(Mine(), port=arguments.port)
    else:
        headrace.attach(arguments.attach, Mine(), "plays", wait=False)
        headrace.attach(arguments.attach, Mine(), "scores")
