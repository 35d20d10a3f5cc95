"""TCP where threads or descriptors run out for a while: the server, its connections, and a reader's pool."""

from __future__ import annotations

import errno
import re
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from llm_datadist import LLMStatusCode
from llm_datadist.testing.stopwatch import Stopwatch
from llm_datadist.transports.seam import Fault, FaultKind, Progress
from llm_datadist.transports.tcp_channel import TcpRead
from llm_datadist.transports.tcp_server import TcpServer
from tests.support.shortage import LIMITS, Shortage
from tests.support.tcp_rig import CALL_S, Rig, extents_of, memory_of
from tests.support.world import wait_until

MakeRig = Callable[..., Rig]


def read_once(rig: Rig) -> Progress:
    source, destination = memory_of(1, 4096, 1), memory_of(1, 4096, None)
    got = rig.read(extents_of(source), extents_of(destination))
    assert got.fault is not None or np.array_equal(source, destination)
    return got


@pytest.mark.parametrize("refused", ["thread", "epoll", "eventfd", "watch"])
def test_g3_the_reader_is_told_that_the_owner_cannot_serve(make_rig: MakeRig, refused: str) -> None:
    """Each shortage strikes a new pair: what is left of a refusal would make a later read ask again, and get along."""
    for first in range(1, 20):
        rig = make_rig()
        with Shortage(first) as shortage:
            got = read_once(rig)
        if refused in shortage.refused:
            break
    assert got.fault is not None and got.fault.kind is FaultKind.REFUSED, got
    assert got.fault.code == LLMStatusCode.LLM_OUT_OF_MEMORY
    assert "serve" in got.fault.text or "no thread can be started for llm-datadist-tcp" in got.fault.text
    for _ in range(2):
        assert read_once(rig).fault is None


def test_g3_the_peer_of_a_reader_that_cannot_start_its_dialler_is_asked_again(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(reader_dials=False)
    monkeypatch.setattr("llm_datadist.transports.tcp_pool._ASK_AGAIN_S", 0.05)
    with Shortage(1) as shortage:
        assert read_once(rig).fault is None
    assert shortage.refused == ["thread"] and len(rig.asked) == 2


def test_g3_a_failure_of_the_serving_thread_is_not_for_good(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert read_once(rig).fault is None
    thread = rig.owner._server._thread
    assert thread is not None

    def fail(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(TcpServer, "_round", fail)
    for _ in range(2):  # the thread sleeps in a round that began before
        read_once(rig)
    thread.join(CALL_S)
    assert not thread.is_alive() and "has failed" in caplog.text
    monkeypatch.undo()
    assert wait_until(lambda: read_once(rig).fault is None, CALL_S)
    assert len(rig.owner._server._connections) == 1


def test_a_command_that_fails_does_not_end_the_serving_thread(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    assert read_once(rig).fault is None
    thread = rig.owner._server._thread

    def fail() -> None:
        raise ZeroDivisionError

    assert rig.owner._server._post(fail)
    assert wait_until(lambda: "could not be taken over" in caplog.text, CALL_S)
    assert read_once(rig).fault is None and rig.owner._server._thread is thread


def test_g14_reads_share_the_connections_that_there_are(rig: Rig) -> None:
    """No descriptor for another one: a read waits until one of them is idle, and does not fail."""
    assert read_once(rig).fault is None
    with Shortage(1, lasting=True) as shortage, ThreadPoolExecutor(4) as threads:
        results = list(threads.map(lambda _: read_once(rig), range(40)))
    assert all(got.fault is None for got in results), results
    assert set(shortage.refused) <= {"socket"}
    assert len(rig.channel.pool.sockets()) == 1


def test_g14_without_any_connection_the_limit_is_told(rig: Rig) -> None:
    with Shortage(1, lasting=True):
        fault = read_once(rig).fault
    assert fault is not None and fault.kind is FaultKind.CHANNEL and "RLIMIT_NOFILE" in fault.text
    assert read_once(rig).fault is None


def never_dialled(make_rig: MakeRig) -> Rig:
    """A reader whose peer dials nothing of what it is asked for."""
    rig = make_rig(reader_dials=False)
    rig.owner_channel.dial_for_peer = lambda count: None  # type: ignore[method-assign]
    return rig


def late_read(rig: Rig) -> Fault | None:
    return rig.read(extents_of(memory_of(1, 8, 1)), extents_of(memory_of(1, 8, None)), timeout_s=0.3).fault


def test_g14_a_reader_for_which_no_connection_comes_says_whether_it_could_take_one(make_rig: MakeRig) -> None:
    rig = never_dialled(make_rig)
    fault = late_read(rig)
    assert fault is not None and fault.kind is FaultKind.TIMEOUT
    for number in (errno.EMFILE, errno.ENFILE):
        with Shortage(1, lasting=True, number=number):
            fault = late_read(rig)
        assert fault is not None and fault.kind is FaultKind.CHANNEL and re.search(LIMITS, fault.text)
        assert isinstance(fault.cause, OSError) and fault.cause.errno == number
    assert not rig.channel.pool._waiting


def test_g14_a_reader_waits_for_a_connection_in_use_as_long_as_it_has_time(make_rig: MakeRig) -> None:
    rig = never_dialled(make_rig)
    ours, theirs = socket.socketpair()
    rig.channel.adopt(ours, False, b"")
    user = TcpRead(rig.channel.pool, b"", extents_of(memory_of(1, 8, None)), 0, 8)
    assert rig.channel.pool.take_idle(user)
    watch = Stopwatch()
    with Shortage(1, lasting=True):
        fault = late_read(rig)
    assert watch.elapsed >= 0.3 and fault is not None and "RLIMIT_NOFILE" in fault.text
    rig.channel.pool.reclaim(user)
    theirs.close()


def test_g14_connections_that_were_given_up_before_they_came_in_are_not_kept(make_rig: MakeRig) -> None:
    rig = make_rig(reader_dials=False)
    for _ in range(20):  # more than a read would try one after the other
        ours, theirs = socket.socketpair()
        theirs.close()
        rig.channel.adopt(ours, False, b"")
    assert not rig.channel.pool.sockets()
    assert read_once(rig).fault is None


def test_g14_idle_connections_that_have_ended_are_dropped_together(make_rig: MakeRig) -> None:
    rig = make_rig(reader_dials=False)
    ends = [socket.socketpair() for _ in range(8)]
    for ours, _ in ends:
        rig.channel.adopt(ours, False, b"")
    assert len(rig.channel.pool.sockets()) == 8
    for _, theirs in ends:
        theirs.close()
    assert read_once(rig).fault is None
    assert len(rig.channel.pool.sockets()) == 1
