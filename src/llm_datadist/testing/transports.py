"""A conformance suite for transports, also those of plug-in authors.

Strategy: a transport's author gives a ``Pair`` (a channel, and an owner whose memory it reads) as two
pytest fixtures of the test module, ``pair`` (may be shared by its tests) and ``doomed`` (a fresh one, which
the test breaks), and subclasses ``TransportConformance``::

    @pytest.fixture(scope="module")
    def pair(): ...
    @pytest.fixture
    def doomed(): ...
    class TestMine(TransportConformance): ...

Those that read by address have more to do: see ``testing.one_sided``.
Every case compares the whole destination, margins included, with a plain NumPy model.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np

from llm_datadist._core.segments import Extents, Segments
from llm_datadist.testing.board import (
    PAGE,
    PROMPT_S,
    Board,
    Runs,
    SparseBoard,
    board_of,
    check_fault,
    extents,
    soon,
)
from llm_datadist.testing.stopwatch import Stopwatch
from llm_datadist.transports.seam import Channel, Completion, FaultKind, Progress

_MIB = 1 << 20


class Pair(Protocol):
    """A reader's channel and the owner at its other end (for this: ``testing.owner``)."""

    @property
    def channel(self) -> Channel:
        """The channel under test, open."""

    def source(self, extents: Extents) -> Extents | bytes:
        """What ``Segments.source`` must be to read these ranges of the owner's memory."""

    def allocate(self, sizes: Sequence[int], seed: int) -> list[int]:
        """The owner maps one region per tensor, from a page's start; returns the addresses there.

        Tensor i is filled with ``testing.owner.pattern(seed + i, sizes[i])``.
        """

    def map_sparse(self, nbytes: int) -> int:
        """The owner maps zeros that take no memory until they are touched."""

    def write(self, address: int, data: bytes) -> None:
        """The owner stores bytes."""

    def unmap(self, address: int, nbytes: int) -> None:
        """The owner unmaps whole pages."""

    def stop(self) -> None:
        """The owner stops running and closes nothing (SIGSTOP). A twin without a process: nothing."""

    def resume(self) -> None:
        """The owner runs again."""

    def kill(self) -> None:
        """The owner is gone without a word; returns when it is."""


class TransportConformance:
    """What every transport must do. Subclass it with the fixtures ``pair`` and ``doomed``.

    Attributes:
        big_nbytes: Size of reads that are to be caught in the middle: some tenths of a second's worth.
        many_runs: Ranges of the largest plan.
    """

    big_nbytes = 1 << 30
    many_runs = 100_000

    # ---- right bytes ----------------------------------------------------------------------------

    def test_b7_random_plans_equal_a_numpy_model(self, pair: Pair) -> None:
        """Order, repetition, overlap and splits of the source; splits and order of the destination."""
        rng = np.random.default_rng(7)
        with board_of(pair, [40_000] * 3, [60_000] * 3) as board:
            for _ in range(150):
                board.check_read(*_random_runs(rng, int(rng.integers(1, 20_000)), 40_000))

    def test_b7_listed_orders(self, pair: Pair) -> None:
        """Blocks as callers name them: out of order, repeated, descending, touching."""
        size = 1000
        with board_of(pair, [size * 16] * 2, [size * 16] * 2) as board:
            for src, dst in (
                ([7, 3, 9], [1, 0, 2]),
                ([5, 5, 5], [4, 9, 2]),
                ([9, 8, 7, 6], [3, 2, 1, 0]),
                ([1, 2, 3, 7, 8], [8, 9, 4, 5, 6]),
            ):
                board.check_read(_blocks(src, size), _blocks(dst, size))

    def test_b6_sizes_around_the_borders_of_calls(self, pair: Pair) -> None:
        """Block sizes around pages, 16 bits and calls; counts around what one call takes."""
        sizes = (1, 7, 4095, 4096, 4097, 65535, 65537, _MIB - 1, _MIB + 1, (4 << 20) - 1, (4 << 20) + 1)
        for size in sizes:
            for count in (3, 1023, 1024, 1025, 2049):
                if size * count <= 24 * _MIB:
                    self._check_scattered(pair, size, count)
        self._check_scattered(pair, 3 * (4 << 20) + 7, 3)

    def test_b6_one_range_longer_than_a_call(self, pair: Pair) -> None:
        """40 MiB and a byte in one range, cut at other places on the other side."""
        total = 40 * _MIB + 1
        with board_of(pair, [total], [total + 10]) as board:
            board.check_read([(0, total)], [(3, total)])
            board.check_read([(0, 17 * _MIB + 1), (17 * _MIB + 1, 23 * _MIB)], [(3, total)])

    def test_m2_every_alignment(self, pair: Pair) -> None:
        """Starts within a page of both sides, odd lengths."""
        shifts = (0, 1, 7, 0x200, 4095)
        with board_of(pair, [8 * PAGE], [8 * PAGE]) as board:
            for there in shifts:
                for here in shifts:
                    for size in (1, 7, 4097):
                        board.check_read([(there, size)], [(here, size)])

    def test_empty_plan_needs_nothing(self, pair: Pair) -> None:
        """No bytes: success, also after the deadline."""
        with board_of(pair, [100], [100]) as board:
            board.check_read([], [])
            assert board.read([], [], deadline=time.monotonic() - 1) == Progress(0)

    def test_offset_beyond_32_bits(self, pair: Pair) -> None:
        """A source range more than 4 GiB into its tensor."""
        offset, data = (5 << 30) + 3, bytes(range(1, 200))
        base = pair.map_sparse(6 << 30)
        pair.write(base + offset, data)
        with board_of(pair, [], [1000]) as board:
            there = extents([base], [(offset, len(data))])
            plan = Segments(pair.source(there), extents(board.here, [(17, len(data))]))
            progress = pair.channel.read(plan).wait(deadline=soon())
            board.check_holds(progress, {17: data})

    def test_b5_very_many_ranges(self, pair: Pair) -> None:
        """Scattered pieces of 64 bytes."""
        self._check_scattered(pair, 64, self.many_runs)

    def test_concurrent_reads_on_one_channel(self, pair: Pair) -> None:
        """Six threads, small and large reads."""
        failures: list[BaseException] = []

        def work(board: Board, seed: int) -> None:
            rng = np.random.default_rng(seed)
            try:
                for _ in range(8):
                    board.check_read(*_random_runs(rng, int(rng.integers(1, 3 * _MIB)), 4 * _MIB))
            except BaseException as exc:
                failures.append(exc)

        boards = [Board(pair, [4 * _MIB] * 2, [6 * _MIB] * 2) for _ in range(6)]
        threads = [threading.Thread(target=work, args=(b, i)) for i, b in enumerate(boards)]
        try:
            _run_all(threads)
        finally:
            for board in boards:
                board.close()
        if failures:
            raise failures[0]

    # ---- bad memory -----------------------------------------------------------------------------

    def test_unreadable_source_is_a_source_fault(self, pair: Pair) -> None:
        """A hole in the owner's memory; the channel is good for the next read."""
        with board_of(pair, [16 * PAGE], [16 * PAGE]) as board:
            pair.unmap(board.bases[0] + 4 * PAGE, PAGE)
            for runs in ([(0, 16 * PAGE)], [(4 * PAGE, 8)], [(0, 100), (5 * PAGE - 1, 2)]):
                total = sum(n for _, n in runs)
                progress = board.read(runs, [(0, total)])
                check_fault(progress, FaultKind.SOURCE, total)
                board.check_only_changed([(0, total)])
                board.refill()
            board.check_read([(5 * PAGE, 11 * PAGE)], [(0, 11 * PAGE)])

    def test_destination_that_cannot_be_written_is_a_destination_fault(self, pair: Pair) -> None:
        """A read-only page, then no access at all; the channel is good for the next read."""
        with board_of(pair, [16 * PAGE], [16 * PAGE]) as board:
            page = board.here[0] + 6 * PAGE
            for rights in ("r", ""):
                board.memory.protect(page, PAGE, rights)
                for runs in ([(0, 14 * PAGE)], [(6 * PAGE, 1)], [(0, 8), (7 * PAGE - 1, 2)]):
                    total = sum(n for _, n in runs)
                    progress = board.read([(0, total)], runs)
                    check_fault(progress, FaultKind.DESTINATION, total)
                board.memory.protect(page, PAGE, "rw")
                board.check_range_unchanged(6 * PAGE, PAGE)
                board.check_only_changed([(0, 14 * PAGE)])
            board.check_read([(0, 14 * PAGE)], [(5, 14 * PAGE)])

    # ---- time and cancellation ------------------------------------------------------------------

    def test_deadline_in_the_past_moves_nothing(self, pair: Pair) -> None:
        """TIMEOUT at once."""
        with board_of(pair, [_MIB], [_MIB]) as board:
            progress = board.read([(0, _MIB)], [(0, _MIB)], deadline=time.monotonic() - 0.001)
            check_fault(progress, FaultKind.TIMEOUT, _MIB)
            board.check_only_changed([])
            board.check_read([(0, _MIB)], [(0, _MIB)])

    def test_t4_nothing_is_written_after_a_timeout(self, pair: Pair) -> None:
        """A large read with very little time, repeatedly; then the channel still works."""
        with _sparse(pair, self.big_nbytes) as board:
            for time_s in (0.001, 0.02):
                watch = Stopwatch()
                progress = pair.channel.read(board.plan).wait(deadline=watch.began + time_s)
                assert watch.within(time_s + PROMPT_S)
                check_fault(progress, FaultKind.TIMEOUT, board.plan.nbytes)
                board.check_still()
        with board_of(pair, [_MIB], [_MIB]) as small:
            small.check_read([(0, _MIB)], [(0, _MIB)])

    def test_cancel_before_wait(self, pair: Pair) -> None:
        """CANCELLED with the reason, and no byte."""
        with board_of(pair, [_MIB], [_MIB]) as board:
            plan = board.plan([(0, _MIB)], [(0, _MIB)])
            read = pair.channel.read(plan)
            read.cancel("enough")
            progress = read.wait(deadline=soon())
            check_fault(progress, FaultKind.CANCELLED, _MIB)
            assert progress.fault is not None and "enough" in progress.fault.text
            board.check_only_changed([])

    def test_t4_cancel_during_a_read(self, pair: Pair) -> None:
        """CANCELLED soon, and nothing is written afterwards."""
        with _sparse(pair, self.big_nbytes) as board:
            read = pair.channel.read(board.plan)
            progress = _caught(read, board, lambda: read.cancel("enough"))
            check_fault(progress, FaultKind.CANCELLED, board.plan.nbytes)
            board.check_still()

    def test_close_during_a_read(self, doomed: Pair) -> None:
        """CANCELLED soon, for this read and for all later ones; closing again changes nothing."""
        with _sparse(doomed, self.big_nbytes) as board:
            read = doomed.channel.read(board.plan)
            progress = _caught(read, board, doomed.channel.close)
            check_fault(progress, FaultKind.CANCELLED, board.plan.nbytes)
            board.check_still()
            doomed.channel.close()
            late = doomed.channel.read(board.plan).wait(deadline=soon())
            check_fault(late, FaultKind.CANCELLED, board.plan.nbytes)
            assert not board.begun()

    # ---- the owner ------------------------------------------------------------------------------

    def test_t2_stopped_owner_delays_nobody_beyond_the_deadline(self, pair: Pair) -> None:
        """All the bytes (its Python is not needed) or TIMEOUT, and nothing when it wakes up."""
        with board_of(pair, [8 * _MIB], [8 * _MIB]) as board:
            pair.stop()
            try:
                watch = Stopwatch()
                progress = board.read([(0, 8 * _MIB)], [(0, 8 * _MIB)], deadline=watch.began + 0.3)
                assert watch.within(0.3 + PROMPT_S)
            finally:
                pair.resume()
            if progress.fault is not None:
                check_fault(progress, FaultKind.TIMEOUT, 8 * _MIB)
                board.check_still()
            board.refill()
            board.check_read([(0, 8 * _MIB)], [(0, 8 * _MIB)])

    def test_t3_owner_that_is_gone(self, doomed: Pair) -> None:
        """PEER_LOST at once, without a byte, every time."""
        with board_of(doomed, [_MIB], [_MIB]) as board:
            plans = [board.plan([(0, n)], [(0, n)]) for n in (8, _MIB, _MIB)]
            doomed.kill()
            for plan in plans:
                watch = Stopwatch()
                progress = doomed.channel.read(plan).wait(deadline=soon())
                assert watch.within(PROMPT_S)
                check_fault(progress, FaultKind.PEER_LOST, plan.nbytes)
                board.check_only_changed([])

    def test_t3_owner_dies_in_the_middle(self, doomed: Pair) -> None:
        """PEER_LOST at once, and nothing is written afterwards."""
        with _sparse(doomed, self.big_nbytes) as board:
            read = doomed.channel.read(board.plan)
            progress = _caught(read, board, doomed.kill)
            check_fault(progress, FaultKind.PEER_LOST, board.plan.nbytes)
            board.check_still()

    def _check_scattered(self, pair: Pair, size: int, count: int) -> None:
        rng = np.random.default_rng(size * count)
        with board_of(pair, [size * count], [size * count + count]) as board:
            src = rng.permutation(count)
            dst = rng.permutation(count)
            board.check_blocks(src, dst, size)


class TransportConformanceSlow(TransportConformance):
    """The same with 10^6 ranges."""

    many_runs = 1_000_000


# ---- helpers ------------------------------------------------------------------------------------


@contextmanager
def _sparse(pair: Pair, nbytes: int) -> Iterator[SparseBoard]:
    board = SparseBoard(pair, nbytes)
    try:
        yield board
    finally:
        board.close()


def _caught(read: Completion, board: SparseBoard, interrupt: Callable[[], None]) -> Progress:
    """Waits in a thread, interrupts that when the first byte has arrived, and returns its answer."""
    answers: list[Progress] = []
    thread = threading.Thread(target=lambda: answers.append(read.wait(deadline=soon())))
    thread.start()
    try:
        limit = soon()
        while not board.begun() and time.monotonic() < limit:
            time.sleep(0.0005)
        interrupt()
        watch = Stopwatch()
    finally:
        thread.join()
    assert watch.within(PROMPT_S), "the read did not end at once"
    return answers[0]


def _run_all(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _blocks(indices: Sequence[int], size: int) -> Runs:
    return [(i * size, size) for i in indices]


def _random_runs(rng: np.random.Generator, total: int, room: int) -> tuple[Runs, Runs]:
    """``total`` bytes in pieces: anywhere within ``room`` at the source, disjoint at the destination."""
    src = [(int(rng.integers(0, room - n + 1)), n) for n in _pieces(rng, total)]
    lengths = _pieces(rng, total)
    dst, at = [(0, 0)] * len(lengths), 0
    for i in rng.permutation(len(lengths)):
        at += int(rng.integers(0, 10))
        dst[i] = (at, lengths[i])
        at += lengths[i]
    return src, dst


def _pieces(rng: np.random.Generator, total: int) -> list[int]:
    cuts = np.unique(rng.integers(1, total + 1, int(rng.integers(0, 30))))
    return [int(n) for n in np.diff(np.concatenate(([0], cuts[cuts < total], [total])))]
