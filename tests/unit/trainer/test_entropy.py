"""Entropies of rows of logits, against float64."""

from __future__ import annotations

import pytest
import torch

from headrace_services.trainer.network.policy_model import compute_entropy

torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("count", "vocabulary"), [(7, 5), (1, 1), (0, 5), (5, 40_000), (3, 100_000)], ids=lambda n: str(n)
)
@pytest.mark.parametrize("scale", [1.0, 30.0, 1e4])
def test_the_entropy_is_that_of_the_softmax(count: int, vocabulary: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = scale * torch.randn(count, vocabulary, generator=generator)
    logits[torch.rand(count, vocabulary, generator=generator) < 0.2] = -torch.inf
    logits[:, 0] = 0.0
    expected = torch.special.entr(logits.double().softmax(-1)).sum(-1)
    found = compute_entropy(logits.log_softmax(-1))
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-6)


def test_n_alike_have_an_entropy_of_log_n_and_a_certain_one_has_0() -> None:
    logits = torch.full((2, 8), -torch.inf)
    logits[0, :4] = 3.0
    logits[1, 2] = -5.0
    torch.testing.assert_close(compute_entropy(logits.log_softmax(-1)), torch.tensor([4.0, 1.0]).log())


def test_a_logit_that_is_not_a_number_hides_nowhere() -> None:
    logits = torch.tensor([[0.0, torch.nan, 1.0], [0.0, 1.0, 2.0]])
    assert compute_entropy(logits.log_softmax(-1)).isnan().tolist() == [True, False]
