"""Reads of transport ``local``: how a plan becomes calls, and how it ends when something goes wrong."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import numpy as np
import pytest

from llm_datadist._core.segments import U64, Segments
from llm_datadist.testing.board import Board, SparseBoard, extents, soon
from llm_datadist.testing.stopwatch import Stopwatch, Taken
from llm_datadist.transports import _libc, _one_sided, local_read
from llm_datadist.transports._waits import Waits
from llm_datadist.transports.movers import Movers
from llm_datadist.transports.seam import FaultKind
from tests.support.local_pair import LocalPair
from tests.support.world import wait_until

MIB = 1 << 20
WAIT_S = 10


@pytest.fixture(scope="module", params=[1, 2], ids=["alone", "mover"])
def pair(request: pytest.FixtureRequest) -> Iterator[LocalPair]:
    with closing(LocalPair(threads=request.param)) as pair:
        yield pair


@pytest.fixture(scope="module")
def pair_with_mover() -> Iterator[LocalPair]:
    with closing(LocalPair(threads=2)) as pair:
        yield pair


@pytest.fixture
def two(pair_with_mover: LocalPair) -> LocalPair:
    """A pair whose reader has one mover, and does not remember what earlier tests made it wait for."""
    pair_with_mover._movers.waits = Waits()
    return pair_with_mover


@pytest.fixture(params=[1, 2], ids=["alone", "mover"])
def doomed(request: pytest.FixtureRequest) -> Iterator[LocalPair]:
    with closing(LocalPair(threads=request.param)) as pair:
        yield pair


def cut(pairs: U64, nbytes: int) -> U64:
    """The head of iovecs, to the byte."""
    ends = np.cumsum(pairs[:, 1])
    last = int(np.searchsorted(ends, np.uint64(nbytes)))
    if last >= len(pairs):
        return pairs
    head: U64 = pairs[: last + 1].copy()
    head[last, 1] -= ends[last] - np.uint64(nbytes)
    return head


def test_short_returns_are_resumed_at_the_exact_byte(
    pair: LocalPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls that copy a part, inside an iovec too, and calls that a signal ends before the first byte."""
    real, rng = _libc.read_pairs, np.random.default_rng(1)

    def short(pid: int, destination: U64, source: U64) -> int:
        if rng.integers(0, 4) == 0:
            return -errno.EINTR
        nbytes = int(rng.integers(1, 70_000))
        return real(pid, cut(destination, nbytes), cut(source, nbytes))

    monkeypatch.setattr(_libc, "read_pairs", short)
    monkeypatch.setattr(_libc, "read_one", lambda *_: -errno.EINTR)
    with closing(Board(pair, [2 * MIB] * 2, [2 * MIB + 5000] * 2)) as board:
        board.check_blocks(np.arange(800)[::-1], np.arange(800), 2001)
        board.check_read([(5, 2 * MIB - 5)], [(1, 2 * MIB - 5)])
        board.check_read([(5, 9), (1, 3)], [(90, 12)])


def test_one_call_stays_within_its_limits(pair: LocalPair, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = _libc.read_pairs, []

    def noting(pid: int, destination: U64, source: U64) -> int:
        calls.append((len(destination), len(source), min(destination[:, 1].sum(), source[:, 1].sum())))
        return real(pid, destination, source)

    monkeypatch.setattr(_libc, "read_pairs", noting)
    with closing(Board(pair, [40 * MIB], [40 * MIB])) as board:
        board.check_read([(0, 40 * MIB)], [(0, 40 * MIB)])
        board.check_blocks(np.arange(5000)[::-1], np.arange(5000), 100)
        board.check_read([(i * 200, 100) for i in range(5000)], [(0, 500_000)])
    assert all(d <= 1024 and s <= 1024 and n <= 16 * MIB for d, s, n in calls)
    assert max(s for _, s, _ in calls) == 1024


@pytest.mark.rule("5.135")
def test_another_thread_goes_on_while_bytes_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one call that takes as long as many turns of the interpreter."""
    nbytes = 512 * MIB
    monkeypatch.setattr(_one_sided, "CALL_NBYTES", nbytes)
    source, destination = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    plan = Segments(*(extents([a.ctypes.data], [(0, nbytes)]) for a in (source, destination)))
    ticks: list[float] = []
    over = threading.Event()

    def tick() -> None:
        while not over.wait(0.001):
            ticks.append(time.monotonic())

    ticker = threading.Thread(target=tick)
    ticker.start()
    watch = Stopwatch()
    with closing(Movers(0)) as movers:
        progress = local_read.LocalRead(local_read.OwnProcess(), movers, plan).wait(deadline=soon())
    took = watch.took()
    over.set()
    ticker.join()
    assert progress.fault is None and destination[-1] == 1
    gaps = np.diff([watch.began, *(t for t in ticks if t > watch.began), watch.began + took.elapsed])
    assert Taken(gaps.max(), took.stalled).within(took.elapsed / 2), (gaps.max(), took)


def test_small_plans_take_one_call_and_no_thread(two: LocalPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """No iovec arrays for one run, no mover under the size that is worth one."""

    def refuse(*_: object) -> int:
        raise AssertionError("not for this plan")

    monkeypatch.setattr(two._movers, "offer", refuse)
    with closing(Board(two, [2 * MIB], [2 * MIB])) as board:
        board.check_read([(MIB, MIB), (0, MIB)], [(0, 2 * MIB)])
        monkeypatch.setattr(_libc, "read_pairs", refuse)
        board.check_read([(16, 8)], [(24, 8)])


def test_a_large_plan_is_shared_with_the_movers(two: LocalPair, monkeypatch: pytest.MonkeyPatch) -> None:
    real, threads, meeting = _libc.read_pairs, set(), threading.Barrier(2)

    def noting(pid: int, destination: U64, source: U64) -> int:
        if threading.get_ident() not in threads:
            threads.add(threading.get_ident())
            meeting.wait(WAIT_S)
        return real(pid, destination, source)

    monkeypatch.setattr(_libc, "read_pairs", noting)
    with closing(Board(two, [8 * MIB], [8 * MIB])) as board:
        board.check_read([(0, 8 * MIB)], [(0, 8 * MIB)])
    assert len(threads) == 2


def sizes_of_calls(monkeypatch: pytest.MonkeyPatch, first_s: float = 0.0) -> list[int]:
    """The MiB of each call from now on; the first one waits for so long."""
    real, sizes = _libc.read_pairs, []

    def noting(pid: int, destination: U64, source: U64) -> int:
        sizes.append(int(min(destination[:, 1].sum(), source[:, 1].sum())) // MIB)
        if len(sizes) == 1:
            time.sleep(first_s)
        return real(pid, destination, source)

    monkeypatch.setattr(_libc, "read_pairs", noting)
    return sizes


def test_beside_a_busy_thread_there_are_few_calls(two: LocalPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a wait for the GIL, and so is each further thread."""
    monkeypatch.setattr(Waits, "note", lambda *_, **__: None)
    with closing(Board(two, [24 * MIB], [24 * MIB])) as board:
        sizes = sizes_of_calls(monkeypatch)
        board.check_read([(0, 24 * MIB)], [(0, 24 * MIB)])
        assert len(sizes) > 2
        monkeypatch.setattr(Waits, "held_up", lambda *_: True)
        monkeypatch.setattr(two._movers, "offer", lambda *_: pytest.fail("not for so few calls"))
        sizes.clear()
        board.check_read([(0, 24 * MIB)], [(0, 24 * MIB)])
        assert sizes == [16, 8]


def test_beside_a_busy_thread_large_plans_are_shared(two: LocalPair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Waits, "held_up", lambda *_: True)
    offers: list[int] = []
    monkeypatch.setattr(two._movers, "offer", lambda _, helpers: offers.append(helpers))
    with closing(Board(two, [40 * MIB], [40 * MIB])) as board:
        sizes = sizes_of_calls(monkeypatch)
        board.check_read([(0, 40 * MIB)], [(0, 40 * MIB)])
    assert offers == [1]
    assert sizes == [16, 16, 8], "in whole calls"


def test_a_call_that_waits_makes_the_next_ones_larger(
    two: LocalPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(two._movers, "offer", lambda *_: None)
    with closing(Board(two, [8 * MIB], [8 * MIB])) as board:
        sizes = sizes_of_calls(monkeypatch, first_s=0.05)
        board.check_read([(0, 8 * MIB)], [(0, 8 * MIB)])
    assert sizes == [4, 4]


def test_a_mover_that_has_not_started_is_not_waited_for(two: LocalPair) -> None:
    """Its only thread is busy with another's work; the read is done without it, and never by it."""
    blocked, release, after = threading.Event(), threading.Event(), threading.Event()

    def block() -> None:
        blocked.set()
        release.wait(WAIT_S)

    two._movers.offer(block, 1)
    assert blocked.wait(WAIT_S)
    try:
        with closing(Board(two, [8 * MIB], [8 * MIB])) as board:
            board.check_read([(0, 8 * MIB)], [(0, 8 * MIB)])
            assert not two._movers._jobs, "the offer is still there"
            release.set()
            two._movers.offer(after.set, 1)
            assert after.wait(WAIT_S)
            board.check_only_changed([])
    finally:
        release.set()


def test_a_mover_that_fails_ends_the_read(two: LocalPair, monkeypatch: pytest.MonkeyPatch) -> None:
    real, main, failed = _libc.read_pairs, threading.get_ident(), threading.Event()

    def failing(pid: int, destination: U64, source: U64) -> int:
        if threading.get_ident() == main:
            assert failed.wait(WAIT_S)
            return real(pid, destination, source)
        failed.set()
        raise MemoryError("no array")

    monkeypatch.setattr(_libc, "read_pairs", failing)
    with closing(Board(two, [64 * MIB], [64 * MIB])) as board:
        progress = board.read([(0, 64 * MIB)], [(0, 64 * MIB)])
    assert progress.fault is not None and progress.fault.kind is FaultKind.CHANNEL
    assert isinstance(progress.fault.cause, MemoryError)


@pytest.mark.parametrize("nbytes", [8, 64, 8 * MIB])
def test_an_owner_that_ends_after_its_last_byte_is_lost(
    doomed: LocalPair, monkeypatch: pytest.MonkeyPatch, nbytes: int
) -> None:
    """Its number may have been another process's during that call."""
    killed = threading.Lock()

    def then_kill(real: Callable[..., int]) -> Callable[..., int]:
        def call(*args: object) -> int:
            done = real(*args)
            with killed:
                moved.append(done)
                if sum(moved) == nbytes:
                    doomed.kill()
            return done

        return call

    moved: list[int] = []
    with closing(Board(doomed, [nbytes], [nbytes])) as board:
        plan = board.plan([(0, nbytes)] if nbytes != 64 else [(32, 32), (0, 32)], [(0, nbytes)])
        monkeypatch.setattr(_libc, "read_pairs", then_kill(_libc.read_pairs))
        monkeypatch.setattr(_libc, "read_one", then_kill(_libc.read_one))
        progress = doomed.channel.read(plan).wait(deadline=soon())
    assert progress.nbytes == nbytes
    assert progress.fault is not None and progress.fault.kind is FaultKind.PEER_LOST
    assert str(doomed.pid) in progress.fault.text


@pytest.mark.parametrize("number", [errno.ESRCH, errno.EFAULT])
def test_an_owner_that_ends_during_a_call_is_lost(
    doomed: LocalPair, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Its memory goes before its number does: what looks like a bad address is a dead process."""

    def killing(*_: object) -> int:
        doomed.kill()
        return -number

    with closing(Board(doomed, [64], [64])) as board:
        plan = board.plan([(32, 32), (0, 32)], [(0, 64)])
        monkeypatch.setattr(_libc, "read_pairs", killing)
        progress = doomed.channel.read(plan).wait(deadline=soon())
    assert progress.fault is not None and progress.fault.kind is FaultKind.PEER_LOST


def test_a_process_without_memory_is_lost(two: LocalPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A zombie's leader, before its pidfd says so."""
    monkeypatch.setattr(_libc, "read_one", lambda *_: -errno.ESRCH)
    monkeypatch.setattr(_libc, "read_pairs", lambda *_: -errno.ESRCH)
    with closing(Board(two, [64], [64])) as board:
        progress = board.read([(0, 64)], [(0, 64)])
    assert progress.fault is not None and progress.fault.kind is FaultKind.PEER_LOST


def test_faults_name_the_address(pair: LocalPair) -> None:
    with closing(Board(pair, [8 * 4096], [8 * 4096])) as board:
        pair.unmap(board.bases[0] + 4096, 4096)
        source = board.read([(4000, 200)], [(0, 200)])
        board.memory.protect(board.here[0] + 4096, 4096, "r")
        destination = board.read([(3 * 4096, 200)], [(4000, 200)])
        board.memory.protect(board.here[0] + 4096, 4096, "rw")
    assert source.nbytes == destination.nbytes == 96
    assert source.fault is not None and hex(board.bases[0] + 4096) in source.fault.text
    assert str(pair.pid) in source.fault.text and isinstance(source.fault.cause, OSError)
    assert destination.fault is not None and hex(board.here[0] + 4096) in destination.fault.text


def test_a_destination_outside_of_the_address_space(pair: LocalPair) -> None:
    """The kernel refuses the whole call for the last of its ranges; what lies before still arrives."""
    with closing(Board(pair, [4096], [4096])) as board:
        here = extents([0], [(board.here[0], 100), (1 << 63, 100)])
        plan = Segments(extents(board.bases, [(0, 200)]), here)
        progress = pair.channel.read(plan).wait(deadline=soon())
    assert progress.nbytes == 100
    assert progress.fault is not None and progress.fault.kind is FaultKind.DESTINATION
    assert hex(1 << 63) in progress.fault.text


def test_rights_that_are_lost_are_a_channel_fault(pair: LocalPair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_libc, "read_pairs", lambda *_: -errno.EPERM)
    monkeypatch.setattr(_libc, "read_one", lambda *_: -errno.EPERM)
    with closing(Board(pair, [64], [64])) as board:
        progress = board.read([(0, 64)], [(0, 64)])
    assert progress.fault is not None and progress.fault.kind is FaultKind.CHANNEL
    assert os.strerror(errno.EPERM) in progress.fault.text


def test_plans_that_this_transport_cannot_read(pair: LocalPair) -> None:
    with pytest.raises(TypeError, match="selector"):
        pair.channel.read(Segments(b"name", extents([1], [(0, 8)])))
    with pytest.raises(ValueError, match="9 bytes into 8"):
        pair.channel.read(Segments(extents([1], [(0, 9)]), extents([1], [(0, 8)])))


def test_ctrl_c_stops_and_joins_the_movers_before_it_propagates(pair: LocalPair) -> None:
    with closing(SparseBoard(pair, 1 << 30)) as board:

        def interrupt() -> None:
            assert wait_until(board.begun, WAIT_S)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

        helper = threading.Thread(target=interrupt)
        helper.start()
        with pytest.raises(KeyboardInterrupt):
            pair.channel.read(board.plan).wait(deadline=soon())
        board.check_still()
        helper.join()
        assert not pair._movers._jobs
    with closing(Board(pair, [8 * MIB], [8 * MIB])) as small:
        small.check_read([(0, 8 * MIB)], [(0, 8 * MIB)])


def test_a_second_ctrl_c_does_not_cut_the_join_short() -> None:
    crew, left = _one_sided.Crew(), threading.Event()
    inside = threading.Event()

    def mover() -> None:
        assert crew.enter()
        inside.set()
        main = threading.main_thread().ident or 0
        for _ in range(3):
            time.sleep(0.02)  # not to be merged into one signal
            signal.pthread_kill(main, signal.SIGINT)
        left.set()
        crew.leave()

    thread = threading.Thread(target=mover)
    thread.start()
    assert inside.wait(WAIT_S)
    with pytest.raises(KeyboardInterrupt):
        crew.dismiss()
    assert left.is_set(), "dismissed while a mover was inside"
    assert not crew.enter()
    thread.join()


def test_a_closed_channel_keeps_its_descriptor_until_the_last_read_ends(doomed: LocalPair) -> None:
    peer = doomed.channel.peer
    held = peer.hold()
    assert held.take()
    before = len(os.listdir("/proc/self/fd"))
    doomed.channel.close()
    assert len(os.listdir("/proc/self/fd")) == before and not peer.gone()
    assert not peer.hold().take()
    held.drop()
    assert len(os.listdir("/proc/self/fd")) == before - 1
