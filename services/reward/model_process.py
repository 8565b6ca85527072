"""The process of a reward model: `python -m headrace_services.reward.model_process`.

Its specification is a `ModelSpecification` (`frames`). Each list of `Conversation` in is followed by a list of answers out, one each and in
order, both in msgpack. An answer is the reward, or the reason why there can't be one.

The model reads what the policy wrote as plain text. Anything in it that looks like a special token is split into ordinary tokens, so that
no completion can end its turn or begin another's.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.base.model_files import problem_of_weights
from headrace.config.environments import RewardModelConfig
from headrace.records.trajectory import apply_template

from .environment_build import compute_build, read_version
from .frames import HubPipes, Started, read_frame, write_frame


class ModelSpecification(msgspec.Struct):
    """The environment `env.<name>`. Its options name the model, and where and how it computes."""

    name: str
    env: dict[str, object]


class Conversation(msgspec.Struct):
    messages: list[dict[str, Any]]
    completion: str


Answer = float | str


def main() -> None:
    hub = HubPipes()
    specification = hub.specification(ModelSpecification)
    name, env = specification.name, RewardModelConfig.model_validate(specification.env)
    try:
        model = RewardModelOnDevice(env)
    except ImportError as error:
        problem = f"{error}; pip install 'headrace[reward-model]'"
    except Exception as error:  # noqa: BLE001  # transformers raises any kind of error for a model that it can't load
        problem = f"env.{name}.model_name {env.model_name}: {type(error).__name__}: {error}"
    else:
        hub.say(Started(builds={name: model.build}))
        decoder = msgspec.msgpack.Decoder(list[Conversation])
        while (request := read_frame(hub.requests)) is not None:
            write_frame(hub.replies, msgspec.msgpack.encode(model.rewards(decoder.decode(request))))
        return
    hub.say(Started(problem=problem))


class RewardModelOnDevice:
    def __init__(self, env: RewardModelConfig) -> None:
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        self._torch = torch
        device = env.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self._device = torch.device(device)
        # Mistral's own tokenizer, which may be beside it, has no chat template, and takes no conversation that ends with an answer
        self._tokenizer = AutoTokenizer.from_pretrained(env.model_name, mistral_format=False)
        model, found = AutoModelForSequenceClassification.from_pretrained(
            env.model_name, dtype=getattr(torch, env.precision), use_safetensors=True, output_loading_info=True
        )
        if (problem := problem_of_weights(type(model).__name__, found["missing_keys"])) is not None:
            raise ValueError(f"{problem}. Give a model that was saved with its head")
        if model.config.num_labels != 1:
            raise ValueError(
                f"it has {model.config.num_labels} labels, but a reward is one number; give a model with one label"
            )
        self._model = model.to(self._device).eval()
        context = getattr(model.config, "max_position_embeddings", None)
        lengths = [length for length in (env.max_model_len, context) if length is not None]
        self._longest = min(lengths, default=None)
        # only this process knows where the model computes; devices of the same type give the same rewards
        software = read_version("torch"), read_version("transformers"), f"on {self._device.type}"
        self.build = compute_build(env, *software)

    def rewards(self, conversations: Sequence[Conversation]) -> list[Answer]:
        """Return one answer per conversation, from one forward pass over those that are not too long."""
        rows = [self._tokens(conversation) for conversation in conversations]
        most = math.inf if self._longest is None else self._longest
        read = [row for row in rows if len(row) <= most]
        rewards = iter(self._forward(read) if read else ())
        return [
            next(rewards)
            if len(row) <= most
            else f"{len(row)} tokens, but the model reads at most {most}; raise max_model_len if it can read more, or lower "
            "policy.max_total_sequence_length"
            for row in rows
        ]

    def _tokens(self, conversation: Conversation) -> list[int]:
        """Return the tokens of the prompt and the completion, as the tokenizer's chat template writes them. Without a template they are a
        pair of texts."""
        tokenizer = self._tokenizer
        if tokenizer.chat_template is None:
            prompt = "\n".join(str(message.get("content", "")) for message in conversation.messages)
            return list(tokenizer(prompt, conversation.completion, split_special_tokens=True)["input_ids"])
        mark = secrets.token_hex(16)
        answered = [*conversation.messages, {"role": "assistant", "content": mark}]
        whole = apply_template(tokenizer.apply_chat_template, answered, tokenize=False)
        before, after = whole.split(mark)
        ids: list[int] = []
        for text, data in ((before, False), (conversation.completion, True), (after, False)):
            ids += tokenizer(text, add_special_tokens=False, split_special_tokens=data)["input_ids"]
        return ids

    def _forward(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """Return the model's reward for each row. A causal model scores at the last token that is not padding, so the padding must be a
        token that no row contains."""
        torch, model = self._torch, self._model
        used, own = {token for row in rows for token in row}, self._tokenizer.pad_token_id
        padding = own if own is not None and own not in used else next(n for n in range(len(used) + 1) if n not in used)
        model.config.pad_token_id = padding
        longest = max(map(len, rows))
        ids = torch.tensor([[*row, *[padding] * (longest - len(row))] for row in rows], device=self._device)
        lengths = torch.tensor([len(row) for row in rows], device=self._device)
        mask = (torch.arange(longest, device=self._device) < lengths[:, None]).long()
        with torch.inference_mode():
            logits = model(input_ids=ids, attention_mask=mask).logits
        return [float(value) for value in logits[:, 0].float().cpu()]


if __name__ == "__main__":
    main()
