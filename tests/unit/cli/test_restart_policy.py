"""The restart policy."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from headrace.base.errors import (
    ConfigError,
    HeadraceError,
    ReplayDenied,
    ReplayUnavailable,
    Restartable,
    ServiceError,
    StoppedByAlarm,
    Unavailable,
    UnusableFile,
)
from headrace.launch.supervisor import BUFFER, START, Child, Finished, GiveUp, Restart, RestartPolicy
from headrace.net.service import (
    EXIT_ALARM,
    EXIT_BUFFER_UNAVAILABLE,
    EXIT_INTERNAL_ERROR,
    EXIT_STOPPED,
    EXIT_USER_ERROR,
    Ending,
)
from headrace.run.object_store import StoreUnreachable

POLICY = RestartPolicy(limit=3, first_delay_s=1.0, longest_delay_s=3.0)


HERE = Ending("KeyError", "headrace_services.trainer.main:7", "'step 8'")


USUAL = {"ends_run": False, "was_ready": True, "fruitless": 0, "is_user_code": False, "ending": None, "before": None}


def decide(code: int, **otherwise: Any) -> Any:
    return POLICY.decide(code, **{**USUAL, **otherwise})


def test_a_clean_end_of_the_trainer_ends_the_run() -> None:
    assert decide(0, ends_run=True) == Finished()


def test_a_clean_end_of_any_other_service_is_a_restart() -> None:
    assert decide(0) == Restart(1.0, "exit code 0")


@pytest.mark.parametrize("code", [-signal.SIGKILL, EXIT_INTERNAL_ERROR, EXIT_STOPPED, 2, 139])
@pytest.mark.parametrize("ends_run", [True, False])
def test_a_crash_is_a_restart(code: int, ends_run: bool) -> None:
    assert isinstance(decide(code, ends_run=ends_run, was_ready=False), Restart)


def test_an_error_that_the_user_must_fix_is_never_restarted() -> None:
    assert decide(EXIT_USER_ERROR) == GiveUp("exit code 1")
    alarm = Ending.of(StoppedByAlarm("the policy collapsed"))
    assert decide(EXIT_ALARM, ending=alarm) == GiveUp("the policy collapsed")


REFUSED = Ending.of(ReplayDenied("user 'r-trainer' may not run FCALL"))


@pytest.mark.parametrize(
    ("code", "known", "waits"),
    [
        (EXIT_BUFFER_UNAVAILABLE, {"was_ready": True}, True),
        (EXIT_BUFFER_UNAVAILABLE, {"was_ready": False, "was_let_in": True}, True),
        (EXIT_BUFFER_UNAVAILABLE, {"was_ready": False}, False),
        (EXIT_USER_ERROR, {"was_let_in": True, "ending": REFUSED}, True),
        (EXIT_USER_ERROR, {"was_ready": True, "ending": REFUSED}, False),  # of a replica that joins a run that is up
    ],
)
def test_law_6_a_buffer_that_was_there_is_waited_for_without_limit(
    code: int, known: dict[str, Any], waits: bool
) -> None:
    decided = decide(code, fruitless=2000, **known)
    assert (isinstance(decided, Restart) and decided.waits == BUFFER) == waits
    assert isinstance(decided, GiveUp) != waits


def because(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def caused(error: Exception, cause: Exception) -> Ending:
    return raised(because(error, cause))


def raised(error: Exception) -> Ending:
    with pytest.raises(type(error)) as caught:
        raise error
    return Ending.of(caught.value)


GONE, FULL = FileNotFoundError(2, "No such file"), OSError(28, "No space left on device")
AROUND: dict[str, tuple[int, Ending]] = {
    "a file": (EXIT_USER_ERROR, caused(ConfigError("security.tls_cert can't be used"), GONE)),
    "a disk": (EXIT_USER_ERROR, caused(ServiceError("can't write a checkpoint"), FULL)),
    "a cause's cause": (EXIT_USER_ERROR, caused(ServiceError("no"), because(ValueError("broken"), GONE))),
    "unforeseen": (EXIT_INTERNAL_ERROR, raised(FULL)),
    "half a file": (EXIT_USER_ERROR, Ending.of(UnusableFile("line 2 is not `ROLE TOKEN`"))),
    "said so": (EXIT_USER_ERROR, Ending.of(ExceptionGroup("", [Unavailable("the directory does not exist")]))),
}


@pytest.mark.parametrize(("code", "ending"), AROUND.values(), ids=AROUND)
def test_law_6_a_start_that_fails_for_its_surroundings_is_repeated(code: int, ending: Ending) -> None:
    known = {"was_let_in": True, "is_starting": True, "ending": ending, "before": ending, "fruitless": 2000}
    decided = decide(code, **known)
    assert (decided.waits, ending.message in decided.reason) == (START, True)
    # a first start, also of a replica that is known before its engine is up, and what fails at work
    for otherwise in ({"was_let_in": False}, {"was_ready": False}, {"is_starting": False}):
        assert isinstance(decide(code, **{**known, **otherwise}), GiveUp)


@pytest.mark.parametrize("error", [ConfigError("unknown key"), ServiceError("another trainer has taken over the run")])
def test_a_start_that_fails_for_another_reason_ends_the_run(error: HeadraceError) -> None:
    ending = caused(error, ValueError("7"))
    assert isinstance(decide(EXIT_USER_ERROR, was_let_in=True, is_starting=True, ending=ending), GiveUp)


def test_a_part_that_hangs_again_and_again_is_no_outage() -> None:
    """A deadline ends in a TimeoutError, which Python counts among the errors of the operating system."""
    ending = caused(Restartable("the engine does not answer"), TimeoutError())
    decided = decide(EXIT_INTERNAL_ERROR, fruitless=3, was_let_in=True, is_starting=True, ending=ending, before=ending)
    assert isinstance(decided, GiveUp)
    store = caused(StoreUnreachable("s3://runs can't be reached"), TimeoutError())
    assert decide(EXIT_INTERNAL_ERROR, fruitless=3, was_let_in=True, is_starting=True, ending=store).waits == START


def test_law_6_a_start_that_can_not_write_its_reason_is_tried_again() -> None:
    decided = decide(EXIT_USER_ERROR, was_let_in=True, is_starting=True)
    assert decided.waits == START
    assert "free space" in decided.reason
    assert decide(EXIT_USER_ERROR, is_starting=True, was_ready=False) == GiveUp("exit code 1")


def test_pauses_of_a_wait_grow_by_the_waits_alone() -> None:
    known = {"was_let_in": True, "is_starting": True, "ending": AROUND["a file"][1]}
    pauses = [decide(EXIT_USER_ERROR, **known, fruitless=3, waited=waited).delay_s for waited in range(3)]
    assert pauses == [1.0, 2.0, 3.0]


def test_a_wait_counts_from_its_begin_and_ends_once_the_service_works() -> None:
    child = Child("trainer", [], None, fruitless=7)
    child.note_wait(BUFFER, "its server is away")
    since = child.waits_since
    child.note_wait(BUFFER, "it is a replica")
    assert (child.waits_since, child.waits_why) == (since, "it is a replica")
    child.note_wait(START, "its certificate is gone")
    assert (child.waits_for, child.waits_since > since) == (START, True)
    child.note_let_in()
    assert (child.was_let_in, child.waits_for, child.fruitless) == (True, "", 7), "what crashed is not forgotten"


def test_delays_double_up_to_the_longest() -> None:
    assert [decide(-9, fruitless=count).delay_s for count in range(3)] == [1.0, 2.0, 3.0]


def test_restarts_without_progress_are_bounded() -> None:
    assert decide(-9, fruitless=3) == GiveUp("killed by signal 9, after 3 restarts without progress")


@pytest.mark.parametrize("code", [0, EXIT_USER_ERROR, 2, EXIT_BUFFER_UNAVAILABLE])
def test_an_environment_that_ends_unanswered_is_for_the_user_to_mend(code: int) -> None:
    assert decide(code, was_ready=False, is_user_code=True) == GiveUp(f"exit code {code} before it answered")


@pytest.mark.parametrize("code", [0, EXIT_USER_ERROR, 2, EXIT_BUFFER_UNAVAILABLE, -signal.SIGSEGV])
def test_an_environment_that_worked_is_started_again_however_often(code: int) -> None:
    assert isinstance(decide(code, fruitless=2000, is_user_code=True), Restart)


def test_the_first_exception_may_heal_and_is_told() -> None:
    assert decide(EXIT_INTERNAL_ERROR, ending=HERE) == Restart(
        1.0, "KeyError at headrace_services.trainer.main:7: 'step 8'"
    )


def test_the_same_exception_twice_in_a_row_ends_the_run() -> None:
    before = Ending(HERE.error, HERE.place, "'step 6'")
    assert decide(EXIT_INTERNAL_ERROR, fruitless=1, ending=HERE, before=before) == GiveUp(
        "it ended twice in a row, without progress between, with KeyError at headrace_services.trainer.main:7: 'step 8'"
    )


MAY_HEAL: dict[str, tuple[int, int, Ending | None]] = {
    "after a kill": (EXIT_INTERNAL_ERROR, 1, None),
    "another exception": (EXIT_INTERNAL_ERROR, 1, Ending("ValueError", HERE.place, "")),
    "another place": (EXIT_INTERNAL_ERROR, 1, Ending(HERE.error, "headrace_services.trainer.main:8", "")),
    "progress between": (EXIT_INTERNAL_ERROR, 0, HERE),
    "a signal": (-signal.SIGKILL, 1, HERE),
    "a signal of a shell": (128 + signal.SIGKILL, 1, HERE),
}


@pytest.mark.parametrize(("code", "fruitless", "before"), MAY_HEAL.values(), ids=MAY_HEAL)
def test_what_is_not_the_same_end_again_may_heal(code: int, fruitless: int, before: Ending | None) -> None:
    assert isinstance(decide(code, fruitless=fruitless, ending=HERE, before=before), Restart)


@pytest.mark.parametrize("error", [Restartable("the engine died"), ReplayUnavailable("no answer")])
def test_an_error_that_asks_for_a_restart_gets_it_up_to_the_limit(error: HeadraceError) -> None:
    ending = Ending.of(error)
    assert isinstance(decide(EXIT_INTERNAL_ERROR, fruitless=2, ending=ending, before=ending), Restart)
    assert decide(EXIT_INTERNAL_ERROR, fruitless=3, ending=ending, before=ending) == GiveUp(
        f"{error}, after 3 restarts without progress"
    )


def test_an_error_that_the_user_must_fix_is_told_in_its_own_words() -> None:
    assert decide(EXIT_USER_ERROR, ending=Ending.of(ServiceError("no such model"))) == GiveUp("no such model")
