"""The object store of a chaos run. Its objects are files, so that none is lost when it is killed; it behaves as another file says.

python -m tests.chaos.store HOST PORT FOLDER CONDUCT
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from urllib.parse import quote, unquote

from tests.chaos.conduct import Conduct
from tests.support.s3_server import CUT, DONE, HALF, S3Server, Stored

SLOW_S = 1.5  # of a request
# A refusal, what is done though the answer is lost, an answer that breaks off in the middle, and now and then what was asked for.
_BAD = (503, CUT, DONE, HALF, None)


class Objects(MutableMapping[str, Stored]):
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _path(self, name: str) -> Path:
        return self._folder / quote(name, safe="")

    def __getitem__(self, name: str) -> Stored:
        try:
            meta, _, data = self._path(name).read_bytes().partition(b"\n")
        except (FileNotFoundError, IsADirectoryError):  # the whole bucket
            raise KeyError(name) from None
        return Stored(data, json.loads(meta))

    def __setitem__(self, name: str, stored: Stored) -> None:
        fresh = self._folder / ".unfinished"
        fresh.write_bytes(json.dumps(stored.meta).encode() + b"\n" + stored.data)
        fresh.rename(self._path(name))

    def __delitem__(self, name: str) -> None:
        self._path(name).unlink()

    def __iter__(self) -> Iterator[str]:
        return (unquote(path.name) for path in self._folder.iterdir() if path.name != ".unfinished")

    def __len__(self) -> int:
        return sum(1 for _ in self)


def main(host: str, port: str, folder: str, conduct: str) -> None:
    heard, turns = Conduct(Path(conduct)).heard, itertools.count()

    def spoil(_method: str, _name: str) -> int | None:
        mood = heard()[1]
        if mood == "slow":
            time.sleep(SLOW_S)
        return _BAD[next(turns) % len(_BAD)] if mood == "bad_answers" else None

    store = S3Server(host, int(port))
    store.objects, store.spoil = Objects(Path(folder)), spoil
    store.server.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
