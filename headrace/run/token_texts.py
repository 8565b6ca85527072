"""The text of single tokens, for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# What stands in a text for bytes that are no UTF-8.
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TokenTexts:
    """Returns the texts of token ids by a Hugging Face `tokenizer`, each as it stands after another token.

    A token of bytes that are no UTF-8 alone, which several tokens make up, has the tokenizer's own name for it (`âĤ`, `<0xE2>`). An id that
    the tokenizer doesn't know has an empty text: models are padded to more ids.

    >>> TokenTexts(tokenizer)([15, 10, 16])
    ['4', '+', '5']
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._size = tokenizer, len(tokenizer)
        self._known: dict[int, str] = {}

    def __call__(self, ids: Sequence[int]) -> list[str]:
        for token in set(ids) - self._known.keys():
            self._known[token] = self._find(token)
        return [self._known[token] for token in ids]

    def _find(self, token: int) -> str:
        if not 0 <= token < self._size:
            return ""
        # some tokenizers leave out the space at the beginning of a text
        once, twice = (str(self._tokenizer.decode([token] * n, clean_up_tokenization_spaces=False)) for n in (1, 2))
        text = twice[len(once) :] if twice.startswith(once) else once
        return str(self._tokenizer.convert_ids_to_tokens(token)) if _REPLACEMENT in text else text
