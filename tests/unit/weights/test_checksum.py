from __future__ import annotations

import pytest
import torch

from headrace_services.refit.checksum import checksum


@pytest.fixture
def tensor() -> torch.Tensor:
    return torch.randn(301, 173, generator=torch.Generator().manual_seed(1))


def test_it_is_of_the_bytes_and_nothing_else(tensor: torch.Tensor) -> None:
    expected = checksum(tensor)
    assert checksum(tensor.view(-1)) == expected
    assert checksum(tensor.view(torch.uint8)) == expected
    assert checksum(tensor.T.contiguous().T) == expected  # other strides
    assert (
        checksum(torch.cat([torch.zeros(1), tensor.view(-1)])[1:]) == expected
    )  # words that begin elsewhere in memory


def test_every_element_and_its_place_counts(tensor: torch.Tensor) -> None:
    """Also in the last word, which is not whole, and where the change is the smallest that bfloat16 knows."""
    for dtype in (torch.float32, torch.bfloat16):
        values = tensor.to(dtype)
        seen = {
            int(checksum(values)),
            int(checksum(values.T)),
            int(checksum(values[:-1])),
            int(checksum(values.view(-1)[:-1])),
        }
        places = [0, 1, 4095, 4096, 8192 + 3, values.numel() - 2, values.numel() - 1]
        for place in places:
            changed = values.clone()
            changed.view(-1).view(torch.int16)[place] ^= 1
            seen.add(int(checksum(changed)))
        assert len(seen) == 4 + len(places)


@pytest.mark.parametrize("count", [1, 2, 4095, 4096, 4097, 8193])
def test_the_first_and_the_last_word_count(count: int) -> None:
    words = torch.arange(count)
    seen = {int(checksum(words))}
    for place in (0, -1):
        changed = words.clone()
        changed[place] ^= 1
        seen.add(int(checksum(changed)))
    assert len(seen) == min(count + 1, 3)


def test_rows_and_columns_of_words_can_not_be_exchanged() -> None:
    words = torch.randint(2**62, (4096, 2), generator=torch.Generator().manual_seed(1))
    square = torch.zeros(4096, 4096, dtype=torch.int64)
    square[:, :2] = words
    assert checksum(square) != checksum(square.T)


@pytest.mark.parametrize("count", [1, 3, 4096, 4097])
def test_zeros_are_told_apart_by_their_number(count: int) -> None:
    assert checksum(torch.zeros(count)) != checksum(torch.zeros(count + 1))
