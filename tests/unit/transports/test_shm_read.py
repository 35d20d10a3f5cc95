"""Reads of transport ``shm``: which way bytes are copied, and that every way gives the right ones."""

from __future__ import annotations

import ctypes
import errno
import mmap
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from llm_datadist._core.segments import Segments
from llm_datadist.testing.board import Runs, extents, soon
from llm_datadist.testing.owner import Memory
from llm_datadist.transports import _libc, shm_copy, shm_read
from llm_datadist.transports.movers import Movers
from llm_datadist.transports.seam import FaultKind, Progress
from llm_datadist.transports.shm import ShmChannel
from llm_datadist.transports.shm_areas import Box
from tests.support.local_pair import PROOF, Loop, nothing
from tests.support.memory import PAGE
from tests.support.shm_pair import MIB, Shared, endpoint, settle, transport

NBYTES = 64 * MIB


class Rig:
    """A process that reads its own shared memory: from ``there`` to ``here``, which is shared, or elsewhere."""

    def __init__(self, threads: int, by_kernel: bool) -> None:
        self.there, self.here = Shared(NBYTES), Shared(NBYTES)
        self.there.view()[:] = np.random.default_rng(1).integers(0, 256, NBYTES, dtype=np.uint8)
        self.loop, self.movers = Loop(), Movers(threads - 1)
        self.movers.offer(nothing, threads - 1)  # starts them now, before a test counts its threads
        self.transport = transport([self.there.area, self.here.area], self.movers, self.loop)
        self.transport._by_kernel = by_kernel
        self.channel: ShmChannel = self.transport.open(endpoint(self.transport.endpoint(PROOF)), deadline=0)
        settle(self.channel)

    def close(self) -> None:
        self.transport.close()
        self.loop.close()
        self.movers.close()
        self.there.close()
        self.here.close()

    def plan(self, src: Runs, dst: Runs, tensors: int, stride: int) -> Segments:
        rows = range(tensors)
        return Segments(
            extents([self.there.area.address + row * stride for row in rows], src),
            extents([self.here.area.address + row * stride for row in rows], dst),
        )

    def check(self, src: Runs, dst: Runs, tensors: int, stride: int) -> None:
        """Reads, and compares every byte with a plain model."""
        plan = self.plan(src, dst, tensors, stride)
        here = self.here.view(0, tensors * stride)
        here[:] = 0xA5
        assert self.channel.read(plan).wait(deadline=soon()) == Progress(plan.nbytes)
        expected = np.full(tensors * stride, 0xA5, np.uint8)
        for row in range(tensors):
            tensor = self.there.view(row * stride, stride)
            stream = np.concatenate([tensor[at : at + n] for at, n in src])
            for at, n in dst:
                expected[row * stride + at : row * stride + at + n], stream = stream[:n], stream[n:]
        assert np.array_equal(here, expected)


@pytest.fixture(scope="module", params=[(1, True), (3, True), (1, False), (3, False)], ids=str)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    with closing(Rig(*request.param)) as rig:
        yield rig


@pytest.fixture(scope="module")
def alone() -> Iterator[Rig]:
    with closing(Rig(1, True)) as rig:
        yield rig


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ways that bytes have gone, in order."""
    taken: list[str] = []

    def noting(name: str, real: Callable[..., int]) -> Callable[..., int]:
        def call(*args: Any) -> int:
            taken.append(name)
            return real(*args)

        return call

    monkeypatch.setattr(shm_copy, "copy_units", noting("units", shm_copy.copy_units))
    monkeypatch.setattr(shm_copy, "copy_runs", noting("runs", shm_copy.copy_runs))
    monkeypatch.setattr(_libc, "read_pairs", noting("kernel", _libc.read_pairs))
    monkeypatch.setattr(_libc, "read_one", noting("kernel", _libc.read_one))
    return taken


def scattered(size: int, count: int, seed: int = 0) -> tuple[Runs, Runs]:
    rng = np.random.default_rng(seed)
    src, dst = rng.permutation(2 * count)[:count], rng.permutation(2 * count)[:count]
    return [(int(i) * size, size) for i in src], [(int(i) * size, size) for i in dst]


# ---- right bytes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [64, 96, 1000, 4096, 4100, 24 << 10, 40_000, 100 << 10])
def test_scattered_blocks(rig: Rig, size: int) -> None:
    """Units of a power of two and of other numbers; runs; more than one claim of the movers."""
    count = min(200, 3 * MIB // size)
    rig.check(*scattered(size, count, size), tensors=3, stride=2 * count * size)


def test_b7_random_plans_equal_a_numpy_model(rig: Rig) -> None:
    """Runs of many lengths with a common unit, shifted by odd numbers, cut differently on both sides."""
    rng = np.random.default_rng(5)
    for unit in (1, 3, 64, 72, 512, 4096, 30_000):
        for _ in range(6):
            total = int(rng.integers(2, 40))
            shift = int(rng.integers(0, 64))
            room = 3 * total + 2
            src = [(shift + unit * int(rng.integers(0, room - n)), unit * n) for n in pieces(rng, total)]
            dst, at = [], int(rng.integers(0, 64))
            for n in pieces(rng, total):
                dst.append((at, unit * n))
                at += unit * (n + int(rng.integers(0, 2)))
            order = rng.permutation(len(dst))
            rig.check(src, [dst[i] for i in order], tensors=int(rng.integers(1, 5)), stride=unit * room + 128)


def pieces(rng: np.random.Generator, total: int) -> list[int]:
    cuts = np.unique(rng.integers(1, total, int(rng.integers(1, 8))))
    return [int(n) for n in np.diff([0, *cuts, total])]


def test_large_plan_of_an_odd_unit_is_cut_at_units(rig: Rig) -> None:
    """Claims of the movers and batches: 3 MiB and more in units of 72 bytes."""
    size, count = 72 * 5, 30_000
    rig.check(*scattered(size, count), tensors=2, stride=2 * count * size)


def test_tensors_in_two_areas(alone: Rig) -> None:
    """Of the peer and of ours; each tensor has its own shift."""
    there, here = alone.there.area.address, alone.here.area.address
    alone.there.view(0, 8 * PAGE)[:] = 1
    alone.here.view(0, 8 * PAGE)[:] = 2
    runs = [(i * 2 * 512, 512) for i in range(4)]
    source, destination = extents([there, here], runs), extents([here + 40 * PAGE, there + 40 * PAGE], runs)
    assert alone.channel.covers(source)
    assert alone.channel.read(Segments(source, destination)).wait(deadline=soon()) == Progress(4096)
    for at, value in ((alone.here, 1), (alone.there, 2)):
        for offset, n in runs:
            assert (at.view(40 * PAGE + offset, n) == value).all()


# ---- which way --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "way"),
    [(1, "kernel"), (60, "kernel"), (64, "units"), (4096, "units"), (32 << 10, "runs"), (MIB, "runs")],
)
def test_sizes_choose_the_way_between_pools(alone: Rig, ways: list[str], size: int, way: str) -> None:
    alone.check(*scattered(size, 10), tensors=2, stride=20 * size)
    assert set(ways) == {way}


@pytest.mark.parametrize(("size", "way"), [(32 << 10, "units"), (64 << 10, "runs")])
def test_sizes_choose_the_way_of_threads_without_the_kernel(ways: list[str], size: int, way: str) -> None:
    """Each call is a wait for the GIL, which the other threads have."""
    with closing(Rig(3, False)) as rig:
        ways.clear()
        rig.check(*scattered(size, 200), tensors=1, stride=400 * size)
    assert set(ways) == {way}


def test_long_runs_go_by_one_thread_and_the_kernel(ways: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that copy run by run would wait for each other's GIL."""
    walking, others = threading.Lock(), threading.Event()
    copy_runs, read_pairs = shm_copy.copy_runs, _libc.read_pairs

    def one(*args: Any) -> int:
        assert walking.acquire(blocking=False), "two at once"
        assert others.wait(10), "nobody else copies meanwhile"
        done = copy_runs(*args)
        walking.release()
        return done

    def another(*args: Any) -> int:
        others.set()
        return read_pairs(*args)

    monkeypatch.setattr(shm_copy, "copy_runs", one)
    monkeypatch.setattr(_libc, "read_pairs", another)
    with closing(Rig(3, True)) as rig:
        rig.check(*scattered(32 << 10, 400), tensors=1, stride=800 * (32 << 10))
    assert set(ways) == {"runs", "kernel"}


@pytest.mark.parametrize(
    ("size", "unit"),
    [(64, 64), (512, 512), (4096, 512), (1000, 500), (4100, 410), (521, 521), (7 * 512, 512)],
)
def test_units_are_so_small_that_numpy_gives_up_the_gil(size: int, unit: int) -> None:
    """From 500 of them on; where no divisor is small enough they stay as they are."""
    runs = extents([0], [(0, size), (3 * size, size)])
    assert shm_copy.unit_nbytes((runs, Box.of(runs))) == unit
    assert shm_copy.CHUNK_NBYTES // 512 >= 2 * 500


def test_without_the_kernel_odd_sizes_go_one_by_one(ways: list[str]) -> None:
    with closing(Rig(1, False)) as rig:
        ways.clear()
        rig.check(*scattered(33, 100), tensors=2, stride=200 * 33)
    assert set(ways) == {"runs"}


def test_one_run_between_pools_is_one_copy(alone: Rig, ways: list[str]) -> None:
    alone.check([(5, 32 << 10)], [(77, 32 << 10)], tensors=1, stride=MIB)
    assert not ways


@pytest.mark.parametrize(("nbytes", "way"), [(8, "kernel"), (16 * MIB, "kernel"), (17 * MIB, "units")])
def test_a_destination_of_no_pool(alone: Rig, ways: list[str], nbytes: int, way: str) -> None:
    """Small: the kernel copies; large: its mapping is looked up."""
    size = min(nbytes, 8192)
    with closing(Memory()) as memory:
        here = memory.map_sparse(2 * nbytes)
        runs = [(i * 2 * size, size) for i in range(nbytes // size)]
        plan = Segments(extents([alone.there.area.address], runs), extents([here], runs))
        assert alone.channel.read(plan).wait(deadline=soon()) == Progress(nbytes)
        for at, _ in runs:
            got = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(here + at))
            assert np.array_equal(got, alone.there.view(at, size))
        del got
    assert set(ways) == {way}


@pytest.mark.parametrize("by_kernel", [True, False])
@pytest.mark.parametrize("spared", [True, False], ids=["a hole that is spared", "a hole in the way"])
def test_a_destination_with_a_hole(
    monkeypatch: pytest.MonkeyPatch, ways: list[str], by_kernel: bool, spared: bool
) -> None:
    """Never a signal: the kernel finds the byte, or the table of mappings does before the first one."""
    monkeypatch.setattr(shm_read, "CHECKED_NBYTES", 0)
    with closing(Rig(1, by_kernel)) as rig, closing(Memory()) as memory:
        ways.clear()
        here = memory.map_sparse(64 * PAGE)
        memory.protect(here + 9 * PAGE, PAGE, "r")
        runs = [(i * 2 * PAGE, PAGE) for i in range(20)] if spared else [(i * PAGE, PAGE) for i in range(20)]
        source = extents([rig.there.area.address], [(i * 3 * PAGE, PAGE) for i in range(20)])
        progress = rig.channel.read(Segments(source, extents([here], runs))).wait(deadline=soon())
        if spared:
            assert progress == Progress(20 * PAGE)
        else:
            assert progress.fault is not None and progress.fault.kind is FaultKind.DESTINATION
            assert hex(here + 9 * PAGE) in progress.fault.text or hex(here) in progress.fault.text
            assert progress.nbytes == (9 * PAGE if by_kernel else 0)
    assert ("kernel" in ways) == by_kernel


@pytest.mark.parametrize("by_kernel", [True, False])
def test_a_destination_in_a_file_that_was_cut_short(monkeypatch: pytest.MonkeyPatch, by_kernel: bool) -> None:
    """Its table of mappings shows no difference, a copy from here would be SIGBUS."""
    monkeypatch.setattr(shm_read, "CHECKED_NBYTES", 0)
    with closing(Rig(1, by_kernel)) as rig, tempfile.TemporaryFile() as file:
        file.truncate(20 * PAGE)
        mapping = mmap.mmap(file.fileno(), 20 * PAGE)
        array = np.frombuffer(mapping, dtype=np.uint8)
        here = array.ctypes.data
        runs = [(i * PAGE, PAGE) for i in range(20)]
        plan = Segments(extents([rig.there.area.address], runs), extents([here], runs))
        whole = rig.channel.read(plan).wait(deadline=soon())
        if by_kernel:
            assert whole == Progress(20 * PAGE) and np.array_equal(array, rig.there.view(0, 20 * PAGE))
        file.truncate(9 * PAGE)
        fault = rig.channel.read(plan).wait(deadline=soon()).fault
        assert fault is not None and fault.kind is FaultKind.DESTINATION
        if by_kernel:
            assert hex(here + 9 * PAGE) in fault.text
        else:
            assert whole.nbytes == 0 and whole.fault == fault
            assert hex(here) in fault.text and "use anonymous memory" in fault.text


def test_a_destination_that_leaves_our_pool(alone: Rig) -> None:
    """One tensor in it, one on a page that cannot be written: the first tensor does not vouch for the second."""
    with closing(Memory()) as memory:
        here = memory.map_sparse(PAGE)
        memory.protect(here, PAGE, "")
        source = extents([alone.there.area.address] * 2, [(0, 8), (64, 8)])
        destination = extents([alone.here.area.address, here], [(0, 16)])
        progress = alone.channel.read(Segments(source, destination)).wait(deadline=soon())
    assert progress.fault is not None and progress.fault.kind is FaultKind.DESTINATION
    assert hex(here) in progress.fault.text and progress.nbytes == 16


# ---- other threads ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_kernel", [True, False])
@pytest.mark.parametrize("size", [4096, 40_000])
def test_a_busy_interpreter_gets_larger_steps(
    monkeypatch: pytest.MonkeyPatch, ways: list[str], by_kernel: bool, size: int
) -> None:
    """Two steps that waited for the GIL: the rest goes by the kernel, or in steps of 4 MiB."""
    waits, counts, name = iter(range(10**9)), [], "copy_units" if size == 4096 else "copy_runs"
    copy = getattr(shm_copy, name)

    def counting(*args: Any) -> int:
        counts.append(copy(*args))
        return int(counts[-1])

    monkeypatch.setattr(shm_copy, name, counting)
    monkeypatch.setattr(shm_copy, "SLOW_S", -1.0)
    monkeypatch.setattr(shm_copy, "_times_waited", lambda: next(waits))
    count = 12 * MIB // size
    with closing(Rig(1, by_kernel)) as rig:
        ways.clear()
        rig.check(*scattered(size, count), tensors=2, stride=2 * count * size)
    first, piece = ("units", 512) if size == 4096 else ("runs", size)
    assert ways[0] == first
    assert set(ways[1:]) == ({"kernel"} if by_kernel else {first})
    assert len(ways) < 10
    assert counts[0] * piece <= MIB, "it went on in small steps"


def test_a_thread_that_the_system_does_not_run_goes_on_as_it_did(
    alone: Rig, ways: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is slow as well, but has not waited for anything."""
    monkeypatch.setattr(shm_copy, "SLOW_S", -1.0)
    monkeypatch.setattr(shm_copy, "_times_waited", lambda: 7)
    alone.check(*scattered(4096, 2000), tensors=1, stride=4000 * 4096)
    assert set(ways) == {"units"}


@pytest.mark.parametrize("size", [4096, 40_000])
def test_copies_end_between_two_steps(alone: Rig, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """A cancel in the middle of a batch is noticed within 2 MiB or so."""
    count = 14 * MIB // size
    plan = alone.plan(*scattered(size, count), tensors=1, stride=2 * count * size)
    read = alone.channel.read(plan)
    steps, real = [0], shm_copy.Pace.next_step

    def counting(pace: shm_copy.Pace) -> int:
        steps[0] += 1
        if steps[0] == 6:
            read.cancel("enough")
        return real(pace)

    monkeypatch.setattr(shm_copy.Pace, "next_step", counting)
    progress = read.wait(deadline=soon())
    assert progress.fault is not None and progress.fault.kind is FaultKind.CANCELLED
    assert 0 < progress.nbytes < 5 * MIB and steps[0] < 12


def test_another_thread_goes_on_while_units_are_copied(alone: Rig) -> None:
    """In the middle half of many of the reads."""
    plan = alone.plan(*scattered(8192, 3840), tensors=1, stride=60 * MIB)
    over, ticks = threading.Event(), [0.0]

    def tick() -> None:
        while not over.wait(0.001):
            ticks.append(time.monotonic())

    ticker = threading.Thread(target=tick)
    ticker.start()
    went_on = 0
    for _ in range(60):
        began = time.monotonic()
        assert alone.channel.read(plan).wait(deadline=soon()).fault is None
        quarter = (time.monotonic() - began) / 4
        went_on += any(began + quarter < at < began + 3 * quarter for at in ticks)
        ticks.clear()
    over.set()
    ticker.join()
    assert went_on >= 10


def test_plans_that_this_transport_cannot_read(alone: Rig) -> None:
    with pytest.raises(TypeError, match="selector"):
        alone.channel.read(Segments(b"name", extents([1], [(0, 8)])))
    with pytest.raises(ValueError, match="9 bytes into 8"):
        alone.channel.read(Segments(extents([1], [(0, 9)]), extents([1], [(0, 8)])))


@pytest.mark.parametrize(("done", "allowed"), [(8, True), (-errno.EPERM, False), (-errno.ENOSYS, False)])
def test_whether_the_kernel_may_is_tried(monkeypatch: pytest.MonkeyPatch, done: int, allowed: bool) -> None:
    monkeypatch.setattr(_libc, "read_one", lambda *_: done)
    with closing(Shared(PAGE)) as area, closing(transport([area.area])) as made:
        assert made._by_kernel is allowed
