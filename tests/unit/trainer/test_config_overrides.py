"""`hf_config_overrides`: a model under another configuration than its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from headrace.base.errors import ServiceError
from headrace.config import Config
from headrace_services.trainer.network.backbone import load_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
    }
    Qwen2ForCausalLM(Qwen2Config(vocab_size=16, max_position_embeddings=16, **sizes)).save_pretrained(folder)
    return str(folder)


def load(model: str, overrides: dict[str, Any], length: int = 32) -> Any:
    config = Config.model_validate({"policy": {"max_total_sequence_length": length}})
    return load_model(AutoModelForCausalLM, config, "policy.model_name", model, "a model", overrides)


def test_an_override_replaces_the_models_key_and_not_its_weights(model: str) -> None:
    loaded = load(model, {"max_position_embeddings": 64, "rms_norm_eps": 1e-3})
    assert (loaded.config.max_position_embeddings, loaded.config.rms_norm_eps) == (64, 1e-3)
    own = load(model, {}, length=16)
    assert own.config.max_position_embeddings == 16
    assert all((a == b).all() for a, b in zip(own.parameters(), loaded.parameters(), strict=True))


def test_a_context_that_no_override_widens_is_refused(model: str) -> None:
    with pytest.raises(ServiceError, match=r"more than the 16 positions.*policy\.hf_config_overrides"):
        load(model, {"rms_norm_eps": 1e-3})


def test_an_override_that_the_configuration_has_not_is_refused(model: str, tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match="max_positions"):
        load(model, {"max_positions": 64})
