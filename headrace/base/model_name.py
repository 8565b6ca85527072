"""Checks keys like `policy.model_name` and `policy.tokenizer.name`: each names a directory, or a model on the Hugging Face Hub."""

from __future__ import annotations

import errno
import logging
import re
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from headrace.base.addresses import url_through_proxy
from headrace.base.backoff import pause_after
from headrace.base.errors import ServiceError, Unavailable
from headrace.base.model_files import problem_of_model

log = logging.getLogger(__name__)

# the pattern of the Hub's own client
_HUB_NAME = re.compile(r"(?:[A-Za-z0-9_](?:[\w.-]{0,94}[A-Za-z0-9_])?/)?[A-Za-z0-9_](?:[\w.-]{0,94}[A-Za-z0-9_])?")

# Tries to reach the Hub, and the pauses between them: a host name may fail to resolve for a moment.
_MOST_TRIES = 3
_FIRST_PAUSE_S, _LAST_PAUSE_S = 1.0, 2.0


@dataclass(frozen=True)
class _Kind:
    """What a key names: a directory with at least one of these `files`, or a model of the Hub that has one."""

    name: str
    files: tuple[str, ...]
    remedy: str

    def is_here(self, key: str, name: str) -> bool:
        """Whether `name`, the value of the configuration's `key`, is such a directory or in the Hub's cache. Otherwise it has the form of a
        name on the Hub, which is not contacted. Raises `ServiceError` for any other name, and for a directory with an unusable file."""
        if self._is_directory(key, name):
            return True
        try:
            return self._is_cached(name)
        except ImportError:
            return False  # huggingface_hub comes with the libraries that load models, so not with the base installation

    def check(self, key: str, name: str) -> None:
        """Raise `ServiceError` unless `name`, the value of the configuration's `key`, names one.

        Call it before anything heavy starts: the libraries that load models query the Hub again and again for a misspelt path. A name that
        is neither a directory nor in the Hub's cache is looked up on the Hub once, with the Hub client's own timeouts and retries, if there
        is a network, and not at all with HF_HUB_OFFLINE=1.
        """
        if not self._is_directory(key, name):
            self._check_hub(key, name)

    def _is_directory(self, key: str, name: str) -> bool:
        path = Path(name)
        if path.is_dir():
            if not any((path / file).is_file() for file in self.files):
                raise Unavailable(f"{key}: {name} has no {' or '.join(self.files)}; {self.remedy}")
            if (problem := problem_of_model(path)) is not None:
                raise Unavailable(f"{key}: {problem}")
            return True
        if is_no_hub_name(name):
            raise Unavailable(f"{key}: the directory {name} does not exist; {self.remedy}")
        return False

    def _is_cached(self, name: str) -> bool:
        from huggingface_hub import try_to_load_from_cache

        return any(isinstance(try_to_load_from_cache(name, file), str) for file in self.files)

    def _check_hub(self, key: str, name: str) -> None:
        from huggingface_hub import constants, hf_hub_download
        from huggingface_hub.errors import RemoteEntryNotFoundError

        try:
            if self._is_cached(name):
                return
            log.info(
                "%s: %s is not a directory here; asking the Hugging Face Hub for a %s of that name",
                key,
                name,
                self.name,
            )
            _reach_hub(name, self.files[0])
            for file in self.files[:-1]:
                try:
                    hf_hub_download(name, file)
                except RemoteEntryNotFoundError:
                    continue
                return
            hf_hub_download(name, self.files[-1])
        except (OSError, ValueError) as error:
            # the message is about connections and caches; the cause names the problem
            lines = str(error.__cause__ or error).strip().splitlines()
            reason = lines[0] if lines else type(error).__name__
            raise ServiceError(
                f"{key}: {name} is not a local directory, and no {self.name} of that name was found on the Hugging Face Hub "
                f"({reason}{url_through_proxy(constants.ENDPOINT)}); {self.remedy}"
            ) from error


MODEL = _Kind(
    "model",
    ("config.json",),
    "give the directory of a Hugging Face causal language model, or the name of one on the Hugging Face Hub or in HF_HOME",
)
TOKENIZER = _Kind(
    "tokenizer",
    ("tokenizer_config.json", "tokenizer.json"),
    "give the directory of a Hugging Face tokenizer, or the name of a model on the Hugging Face Hub or in HF_HOME that has one",
)


def is_no_hub_name(name: str) -> bool:
    """Whether `name` can only be a directory."""
    return not _HUB_NAME.fullmatch(name) or "--" in name or ".." in name


def _reach_hub(name: str, file: str) -> None:
    """Raise `OSError` if the Hub can't be reached: its client would wait half a minute between its tries. A Hub that is slow, or answers
    with an error, is left to the client."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    for tries in range(1, _MOST_TRIES + 1):
        try:
            get_hf_file_metadata(hf_hub_url(name, file))
        except Exception as error:  # noqa: BLE001 - the client's own, of whatever library it uses
            refusal = _refusal(error)
            if refusal is None:
                return
            if tries == _MOST_TRIES:
                raise refusal from None
            time.sleep(pause_after(tries, _FIRST_PAUSE_S, _LAST_PAUSE_S))
        else:
            return


def _refusal(error: BaseException | None) -> OSError | None:
    """Return the operating system's error, among the causes of `error`, that the host can't be reached; None if it has another cause."""
    while error is not None:
        if isinstance(error, socket.gaierror | ConnectionRefusedError) or (
            isinstance(error, OSError) and error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH)
        ):
            return error
        error = error.__cause__ or error.__context__
    return None
