"""What is short, in words; and threads that cannot be started."""

from __future__ import annotations

import errno
import os
import resource
import sys
import threading

import pytest

from llm_datadist import LLMException, LLMStatusCode, OutOfMemoryError
from llm_datadist._shortages import failure_of, hint_of, is_shortage, named, reason_of, start_thread
from tests.support.shortage import Shortage, descriptors_left


def test_a_thread_runs_and_is_a_daemon() -> None:
    ran = threading.Event()
    thread = start_thread(ran.set, "llm-test")
    thread.join()
    assert ran.is_set() and thread.daemon and thread.name == "llm-test"


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError()])
def test_g3_a_thread_that_cannot_be_started_says_what_is_short(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise error

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(OutOfMemoryError) as told:
        start_thread(lambda: None, "llm-test")
    assert told.value.__cause__ is error
    for part in (
        "for llm-test",
        "RLIMIT_NPROC (ulimit -u",
        "pids.max",
        "threads of Python",
        "raise the limit",
    ):
        assert part in str(told.value)


@pytest.mark.parametrize("step", ["_bootstrap", "_bootstrap_inner"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_g3_a_thread_without_memory_for_its_first_steps_is_refused(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(_: threading.Thread) -> None:
        raise MemoryError

    before = threading.enumerate()
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    monkeypatch.setattr(threading.Thread, step, die)
    with pytest.raises(OutOfMemoryError, match="for llm-test"):
        start_thread(lambda: None, "llm-test")
    assert threading.enumerate() == before


def test_g3_a_thread_that_ends_before_anybody_looks_has_begun() -> None:
    for _ in range(100):
        thread = start_thread(lambda: None, "llm-test")
        thread.join()
        assert not thread.is_alive() and thread.ident is not None


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EMFILE, ["RLIMIT_NOFILE", "ulimit -n", str(resource.getrlimit(resource.RLIMIT_NOFILE)[0])]),
        (errno.ENFILE, ["fs.file-max"]),
        (errno.ENOMEM, ["RLIMIT_AS", "vm.max_map_count: ", "memory.max"]),
        (errno.ENOBUFS, ["RLIMIT_AS"]),
        (errno.ENOSPC, ["fs.epoll.max_user_watches: "]),
    ],
)
def test_each_limit_is_named_with_what_to_do(number: int, words: list[str]) -> None:
    error = OSError(number, os.strerror(number))
    assert is_shortage(error)
    for word in [*words, os.strerror(number), "limit" if "RLIMIT" in words[0] else "raise it"]:
        assert word in reason_of(error)
    assert failure_of("it", error).status_code == LLMStatusCode.LLM_OUT_OF_MEMORY


def test_what_is_no_shortage_keeps_its_own_words() -> None:
    error = OSError(errno.EPERM, "Operation not permitted")
    assert not is_shortage(error) and not hint_of(errno.EPERM) and not hint_of(None)
    assert reason_of(error) == "Operation not permitted"
    assert str(failure_of("no socket", error)) == "no socket: Operation not permitted"
    assert failure_of("no socket", error).status_code == LLMStatusCode.LLM_FAILED
    assert reason_of(ValueError()) == "ValueError"


def test_the_words_need_nothing_of_what_is_short() -> None:
    with descriptors_left(0), Shortage(1, lasting=True):
        for number in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC):
            assert hint_of(number)
        with pytest.raises(OutOfMemoryError, match="RLIMIT_NPROC"):
            start_thread(lambda: None, "llm-test")


def test_system_errors_get_a_name_and_a_cause() -> None:
    with pytest.raises(OutOfMemoryError, match=r"it cannot be: .*RLIMIT_AS") as told, named("it cannot be"):
        raise MemoryError
    assert isinstance(told.value.__cause__, MemoryError)
    with pytest.raises(LLMException, match="it cannot be: Permission denied"), named("it cannot be"):
        raise PermissionError(errno.EACCES, "Permission denied")
    with pytest.raises(ZeroDivisionError), named("it cannot be"):
        raise ZeroDivisionError
