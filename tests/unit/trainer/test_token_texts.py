"""The text of each token: with the tokenizers of real families, its texts joined are the text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from headrace.run.token_texts import TokenTexts

TEXT = "two  words, the 🙂 of it\n"


def bytes_of_characters() -> Any:
    """GPT-2's kind: a token is a byte, and a byte a character."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: place for place, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    made.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=made)


def pieces() -> Any:
    """Llama's kind: a space begins a word, bytes stand for characters that it doesn't know, and a text's first space is left out."""
    words = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"abcdefghijklmnopqrstuvwxyz,",
        "▁w",
        "▁t",
        "th",
    ]
    merges = [("▁", "w"), ("▁", "t"), ("t", "h")]
    vocabulary = {word: place for place, word in enumerate(words)}
    made = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace()  # type: ignore[assignment]
    made.decoder = decoders.Sequence(  # type: ignore[assignment]
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made)


@pytest.mark.parametrize(("tokenizer", "part"), [(bytes_of_characters(), "Ł"), (pieces(), "<0x9F>")])
def test_texts_joined_are_the_text_but_for_parts_of_characters(tokenizer: Any, part: str) -> None:
    texts = TokenTexts(tokenizer)
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    found = texts(ids)
    assert len(found) == len(ids)
    assert part in found
    without = TEXT.partition("🙂")
    assert "".join(found).strip(" ").startswith(without[0])
    assert "".join(found).endswith(without[2])
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(found)
    assert texts(ids) == found


def test_ids_that_a_padded_model_has_more_are_empty() -> None:
    tokenizer = pieces()
    assert TokenTexts(tokenizer)([len(tokenizer), 10**6, -1]) == ["", "", ""]


def test_special_tokens_are_shown(tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    ids = tokenizer.all_special_ids
    assert TokenTexts(tokenizer)(ids) == tokenizer.convert_ids_to_tokens(ids)
