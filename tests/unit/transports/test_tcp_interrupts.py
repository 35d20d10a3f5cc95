"""Reads over TCP that are cut short: deadline, cancel, close, signals."""

from __future__ import annotations

import errno
import math
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from llm_datadist._core import limits
from llm_datadist._core.segments import Extents, Segments
from llm_datadist._shortages import start_thread
from llm_datadist.testing.owner import Memory
from llm_datadist.testing.stopwatch import Stopwatch
from llm_datadist.testing.stream_owner import encode_extents, first_frame
from llm_datadist.transports import tcp_channel
from llm_datadist.transports._sockets import Buffer
from llm_datadist.transports.seam import Fault, FaultKind, PeerEndpoint, Progress
from llm_datadist.transports.tcp import TcpTransport
from llm_datadist.transports.tcp_channel import TcpRead
from llm_datadist.transports.tcp_frames import encode_request
from llm_datadist.transports.tcp_pool import dial
from llm_datadist.transports.tcp_reading import ReadingConnection
from tests.support.tcp_rig import (
    CALL_S,
    MakeRig,
    Rig,
    extents_of,
    in_thread,
    memory_of,
    silent,
)
from tests.support.world import wait_until


@pytest.mark.parametrize("sent", [b"", b"x" * 100])
def test_the_deadline_holds_and_nothing_is_written_afterwards(reader: TcpTransport, sent: bytes) -> None:
    owner, read, destination = silent(reader, sent)
    watch = Stopwatch()
    progress = read.wait(deadline=watch.began + 0.3)
    assert watch.elapsed >= 0.25 and watch.within(0.8)
    assert progress.fault is not None and progress.fault.kind is FaultKind.TIMEOUT
    before = destination.copy()
    owner.send(b"y" * 4000)
    owner.close()
    assert np.array_equal(before, destination)


def test_a_read_that_begins_late_says_so(rig: Rig) -> None:
    for _ in range(2):
        fault = rig.read(
            extents_of(memory_of(1, 8, 1)), extents_of(memory_of(1, 8, None)), timeout_s=-1
        ).fault
        assert fault is not None and (fault.kind, fault.text) == (
            FaultKind.TIMEOUT,
            "no time was left to ask",
        )
        assert rig.channel.pool.sockets() == []


def test_a_read_after_one_that_ran_out_of_time_takes_a_new_connection(rig: Rig) -> None:
    source, destination = memory_of(1, 64 << 20, 1), memory_of(1, 64 << 20, None)
    late = rig.read(extents_of(source), extents_of(destination), timeout_s=0.004)
    assert late.fault is not None and late.fault.kind is FaultKind.TIMEOUT
    assert rig.read(extents_of(source), extents_of(destination)).fault is None
    assert np.array_equal(source, destination)
    assert wait_until(lambda: rig.source.open_count == 0, CALL_S)


def test_cancel_ends_a_read_at_once(reader: TcpTransport) -> None:
    owner, read, destination = silent(reader, b"x")
    result = in_thread(lambda: read.wait(deadline=math.inf))
    assert wait_until(lambda: destination[0, 0] == ord("x"), CALL_S)
    watch = Stopwatch()
    read.cancel("enough")
    progress = result()
    assert watch.within(0.5)
    assert progress.fault is not None
    assert (progress.fault.kind, progress.fault.text) == (FaultKind.CANCELLED, "enough")
    owner.close()


@pytest.mark.parametrize("kept", [False, True], ids=["no connection yet", "one kept"])
def test_cancel_before_wait(rig: Rig, kept: bool) -> None:
    if kept:
        assert rig.read(extents_of(memory_of(1, 8, 2)), extents_of(memory_of(1, 8, None))).fault is None
    destination = memory_of(1, 8, None)
    read = rig.channel.read(Segments(encode_extents(extents_of(memory_of(1, 8, 1))), extents_of(destination)))
    read.cancel()
    progress = read.wait(deadline=math.inf)
    assert progress.fault is not None and progress.fault.kind is FaultKind.CANCELLED
    assert (destination == 0xA5).all()


def test_cancel_ends_a_dial_that_nobody_answers(reader: TcpTransport) -> None:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(0)
    fillers = [socket.socket() for _ in range(3)]
    for filler in fillers:
        filler.setblocking(False)
        filler.connect_ex(listener.getsockname())
    channel = reader.open(PeerEndpoint(1, b"", b"t" * 16, listener.getsockname(), lambda n: None), deadline=0)
    read = channel.read(Segments(b"x", extents_of(memory_of(1, 8, None))))
    late = channel.read(Segments(b"x", extents_of(memory_of(1, 8, None)))).wait(
        deadline=time.monotonic() + 0.2
    )
    assert late.fault is not None and late.fault.kind is FaultKind.TIMEOUT
    result = in_thread(lambda: read.wait(deadline=math.inf))
    assert wait_until(lambda: len(channel.pool._dialling) == 1, CALL_S)
    watch = Stopwatch()
    read.cancel("enough")
    progress = result()
    assert watch.within(0.5)
    assert progress.fault is not None and progress.fault.kind is FaultKind.CANCELLED
    for sock in (listener, *fillers):
        sock.close()


def test_a_dial_that_was_cancelled_before_it_began_does_not_wait() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(OSError) as caught:
        dial(listener.getsockname(), math.inf, time.monotonic, lambda sock: False)
    assert caught.value.errno == errno.ECANCELED


def test_close_ends_reads_and_later_ones(reader: TcpTransport) -> None:
    owner, read, destination = silent(reader, b"x")
    result = in_thread(lambda: read.wait(deadline=math.inf))
    assert wait_until(lambda: destination[0, 0] == ord("x"), CALL_S)
    owner.channel.close()
    owner.channel.close()
    for progress in (
        result(),
        owner.channel.read(Segments(b"x", extents_of(destination))).wait(deadline=math.inf),
    ):
        assert progress.fault is not None and progress.fault.kind is FaultKind.CANCELLED
        assert "link was closed" in progress.fault.text
    owner.close()


def test_closing_the_owners_channel_cuts_off_its_readers(rig: Rig) -> None:
    source = memory_of(1, 10, 1)
    assert rig.read(extents_of(source), extents_of(memory_of(1, 10, None))).fault is None
    rig.owner_channel.close()
    assert wait_until(lambda: not rig.owner._server._connections, CALL_S)
    progress = rig.read(extents_of(source), extents_of(memory_of(1, 10, None)))
    assert progress.fault is not None and progress.fault.kind is FaultKind.PEER_LOST


@pytest.mark.parametrize("half", [False, True], ids=["closed", "half closed"])
def test_a_reader_that_goes_away_gives_the_memory_back(rig: Rig, half: bool) -> None:
    source = memory_of(1, 64 << 20, 1)
    with socket.create_connection(rig.port.address) as sock:
        selector = encode_extents(extents_of(source))
        request = encode_request(1, 0, source.size, selector) + selector
        sock.sendall(first_frame(rig.token, True) + request)
        assert wait_until(lambda: rig.source.open_count == 1, CALL_S)
        if half:
            sock.shutdown(socket.SHUT_WR)
            assert wait_until(lambda: rig.source.open_count == 0, CALL_S)
    assert wait_until(lambda: rig.source.open_count == 0, CALL_S)


def test_an_exception_of_a_signal_handler_ends_the_read_and_its_connection(reader: TcpTransport) -> None:
    owner, read, destination = silent(reader, b"x")

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        watch = Stopwatch()
        with pytest.raises(KeyboardInterrupt):
            read.wait(deadline=math.inf)
        assert watch.within(0.7)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not owner.channel.pool.sockets()
    seen = destination.copy()
    owner.send(b"y" * 4000)
    owner.close()
    assert np.array_equal(seen, destination)


def test_a_fault_of_one_stripe_ends_the_others(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_channel, "STRIPE_NBYTES", 1 << 20)
    rig = make_rig(stripes=4)
    memory = Memory()
    base = memory.map_sparse(4 << 20)
    memory.protect(base + (3 << 20) + 4096, 4096, "r")
    source = memory_of(1, 4 << 20, 1)
    whole = extents_of(source)
    progress = rig.read(whole, Extents.of(np.array([base], np.uint64), whole.offsets, whole.lengths))
    assert progress.fault is not None and progress.fault.kind is FaultKind.DESTINATION
    assert not [t for t in threading.enumerate() if t.name == "llm-datadist-stripe"]
    memory.close()


def test_an_idle_server_sleeps(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    source, destination = memory_of(1, 32 << 20, 1), memory_of(1, 32 << 20, None)
    rounds: list[int] = []
    one_round = rig.owner._server._round

    def count(epoll: select.epoll, scratch: Buffer, events: list[tuple[int, int]]) -> None:
        rounds.append(len(events))
        one_round(epoll, scratch, events)

    monkeypatch.setattr(rig.owner._server, "_round", count)
    assert rig.read(extents_of(source), extents_of(destination)).fault is None
    assert wait_until(lambda: rig.source.open_count == 0, CALL_S)
    before = len(rounds)
    assert before
    threading.Event().wait(0.2)
    assert len(rounds) - before <= 1


def test_g3_parts_for_which_no_thread_can_be_started_are_read_by_the_caller(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_channel, "STRIPE_NBYTES", 1 << 20)
    rig = make_rig(stripes=3)
    source, destination = memory_of(1, 64 << 20, 1), memory_of(1, 64 << 20, None)
    start, begun = threading.Thread.start, []

    def start_one(thread: threading.Thread) -> None:
        if thread.name == "llm-datadist-stripe":
            begun.append(thread)
            if len(begun) > 1:
                raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_one)
    assert rig.read(extents_of(source), extents_of(destination)).fault is None
    assert np.array_equal(source, destination)
    assert len(begun) == 2 and not begun[0].is_alive()


@pytest.mark.parametrize("most", [0, 1, 8])
def test_g18_the_threads_of_all_wide_reads_have_a_limit(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """What has none is read by the thread that waits for it."""
    monkeypatch.setattr(tcp_channel, "STRIPE_NBYTES", 1 << 20)
    monkeypatch.setattr(limits, "STRIPES", most)
    rig = make_rig(stripes=4)
    source, destination = memory_of(1, 64 << 20, 1), memory_of(1, 64 << 20, None)
    quota, seen = rig.channel._helpers._quota, list[int]()
    wait = TcpRead.wait

    def note(part: TcpRead, *, deadline: float) -> Progress:
        seen.append(quota.taken)
        return wait(part, deadline=deadline)

    monkeypatch.setattr(TcpRead, "wait", note)
    assert rig.read(extents_of(source), extents_of(destination)).fault is None
    assert np.array_equal(source, destination)
    assert len(seen) == 4 and max(seen) <= most and quota.taken == 0


def test_a_connection_that_a_late_cancel_has_shut_down_is_not_kept(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, destination = memory_of(1, 8, 1), memory_of(1, 8, None)
    read = rig.channel.read(Segments(encode_extents(extents_of(source)), extents_of(destination)))
    whole = ReadingConnection.read

    def read_then_cancel(self: ReadingConnection, *args: Any) -> Fault | None:
        fault = whole(self, *args)
        read.cancel("too late")
        return fault

    monkeypatch.setattr(ReadingConnection, "read", read_then_cancel)
    assert read.wait(deadline=time.monotonic() + CALL_S).fault is None
    assert not rig.channel.pool.sockets()


def test_cancel_ends_waiting_for_a_connection(reader: TcpTransport) -> None:
    asked = threading.Event()
    peer = PeerEndpoint(1, b"", b"t" * 16, None, lambda count: asked.set())
    channel = reader.open(peer, deadline=0)
    read = channel.read(Segments(b"x", extents_of(memory_of(1, 8, None))))
    result = in_thread(lambda: read.wait(deadline=math.inf))
    assert asked.wait(CALL_S)
    watch = Stopwatch()
    read.cancel("enough")
    progress = result()
    assert watch.within(0.5)
    assert progress.fault is not None and progress.fault.kind is FaultKind.CANCELLED


def test_a_stripe_that_fails_does_not_wait_for_the_others(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_channel, "STRIPE_NBYTES", 4)
    rig = make_rig(stripes=2)

    def fail_or_hang(
        self: ReadingConnection, selector: bytes, destination: Extents, start: int, *_: Any
    ) -> Fault:
        if start == 0:
            return Fault(FaultKind.SOURCE, "unreadable")
        assert self.sock.recv(1) == b""  # until it is shut down
        self.in_step = False
        return Fault(FaultKind.PEER_LOST, "shut down")

    monkeypatch.setattr(ReadingConnection, "read", fail_or_hang)
    memory = memory_of(1, 8, 1)
    progress = rig.read(extents_of(memory), extents_of(memory_of(1, 8, None)))
    assert progress.fault == Fault(FaultKind.SOURCE, "unreadable")


def test_g13_an_interrupt_at_the_start_of_a_helper_leaves_none_that_reads(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs, but who started it was interrupted before that could be noted."""
    monkeypatch.setattr(tcp_channel, "STRIPE_NBYTES", 1 << 20)
    rig = make_rig(stripes=2)
    source, destination = memory_of(1, 64 << 20, 1), memory_of(1, 64 << 20, None)
    reads: list[bool] = []
    part_wait = TcpRead.wait

    def slow_wait(part: TcpRead, *, deadline: float) -> Progress:
        reads.append(True)
        try:
            return part_wait(part, deadline=deadline)
        finally:
            threading.Event().wait(0.2)
            reads.pop()

    def interrupted(target: Callable[[], None], name: str) -> threading.Thread:
        start_thread(target, name)
        assert wait_until(lambda: bool(reads), CALL_S)
        raise KeyboardInterrupt

    monkeypatch.setattr(TcpRead, "wait", slow_wait)
    monkeypatch.setattr(tcp_channel, "start_thread", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rig.read(extents_of(source), extents_of(destination))
    assert not reads
