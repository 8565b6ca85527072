"""A test that lacks a tool, by day and at nightly size."""

from __future__ import annotations

import pytest

REASON = "socks are not installed: apt-get install socks"


@pytest.mark.parametrize(("nightly", "outcome"), [(False, "skipped"), (True, "failed")])
def test_what_lacks_a_tool_fails_only_at_night(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, nightly: bool, outcome: str
) -> None:
    monkeypatch.setattr(request.config.option, "nightly", nightly)
    call = pytest.CallInfo.from_call(lambda: pytest.skip(REASON), "call")
    report = request.node.ihook.pytest_runtest_makereport(item=request.node, call=call)
    assert report.outcome == outcome
    assert REASON in str(report.longrepr)
    request.node.add_marker(pytest.mark.skipif(True, reason="a GPU is no tool"))
    assert request.node.ihook.pytest_runtest_makereport(item=request.node, call=call).outcome == "skipped"
