"""What all services share."""

from __future__ import annotations

import gc

import pytest

from headrace.service import importing


def test_garbage_is_not_collected_while_much_is_imported_and_is_again_afterwards() -> None:
    with importing():
        with importing():
            assert not gc.isenabled()
        assert not gc.isenabled(), "the outer import goes on"
    assert gc.isenabled()
    with pytest.raises(ImportError), importing():
        raise ImportError
    assert gc.isenabled()
