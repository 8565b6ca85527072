"""What a key like `policy.model_name` may name: a directory, or a model of the Hugging Face hub."""

from __future__ import annotations

import logging
from pathlib import Path

from headrace.errors import ServiceError

log = logging.getLogger(__name__)

_REMEDY = "give the directory of a Hugging Face causal language model, or the name of one on the hub or in HF_HOME"


def check_model_name(key: str, name: str) -> None:
    """Refuse a `name`, given by `key` of the configuration, that is no model's, before anything heavy starts: left to the libraries
    that load it, a misspelt path is asked for on the hub again and again.

    Asks the hub, once and with its own patience, for a name that is neither a directory nor in the hub's cache; with
    HF_HUB_OFFLINE=1 there is nobody to ask. Raises `ServiceError`.
    """
    path = Path(name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ServiceError(f"{key}: {name} has no config.json; {_REMEDY}")
        return
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ServiceError(f"{key}: there is no directory {name}; {_REMEDY}")
    _check_hub(key, name)


def _check_hub(key: str, name: str) -> None:
    # with the libraries that load models, so not with the base installation
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    try:
        if isinstance(try_to_load_from_cache(name, "config.json"), str):
            return
        log.info("%s: there is no directory %s here; asking the hub for a model of that name", key, name)
        hf_hub_download(name, "config.json")
    except (OSError, ValueError) as error:
        # its own words speak of connections and caches, the cause says what is the matter
        said = str(error.__cause__ or error).strip().splitlines()
        reason = said[0] if said else type(error).__name__
        raise ServiceError(
            f"{key}: there is no directory {name} here, nor does the hub give a model of that name ({reason}); {_REMEDY}"
        ) from error
