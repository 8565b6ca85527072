"""An environment of OpenEnv, in the Python that has it: a number to guess. `openenv_environment.py PORT`."""

from __future__ import annotations

import sys
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    number: int


class Said(Observation):
    said: str


class Secret(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, secret: int = 0, **_: Any) -> Said:
        self._secret = secret
        return Said(said="guess", done=False, reward=0.0)

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Said:
        right = action.number == self._secret
        return Said(said="right" if right else "no", done=right, reward=float(right))

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    app = create_app(Secret, Guess, Said, env_name="secret", max_concurrent_envs=8)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
