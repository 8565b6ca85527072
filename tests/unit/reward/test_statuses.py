"""The statuses of a score are those of the contract (proto/headrace/v1/trajectory.proto), wherever they are listed."""

from __future__ import annotations

import re
from typing import get_args

from headrace.env.wire import STATUSES
from headrace.records.score import Status
from headrace.v1 import trajectory_pb2 as pb
from headrace_services.replay import library
from headrace_services.reward.combine import WORST


def test_statuses_are_those_of_the_contract_and_one_of_the_hub() -> None:
    assert {*get_args(Status)} == {*STATUSES, "UNSENDABLE"}
    assert STATUSES["SCORED"] == pb.STATUS_SCORED
    assert pb.STATUS_UNSPECIFIED not in STATUSES.values()


def test_the_buffers_functions_take_exactly_these() -> None:
    (listed,) = re.findall(r"^local STATUS = one_of\(\{(.*)\}\)$", library.source(), re.MULTILINE)
    assert sorted(re.findall(r"'(\w+)'", listed)) == sorted(get_args(Status))


def test_a_combination_knows_how_bad_each_failure_of_a_part_is() -> None:
    assert sorted(WORST) == sorted(STATUSES.keys() - {"SCORED"})
