"""TCP reads from an owner in another process that is killed, stopped or cut off in the middle."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

from llm_datadist._core.segments import Extents, Segments
from llm_datadist.testing.owner import pattern
from llm_datadist.testing.stopwatch import Stopwatch
from llm_datadist.transports.seam import FaultKind, Progress
from tests.support.tcp_rig import CALL_S, ProcessRig, extents_of, free_memory, in_thread, memory_of
from tests.support.world import wait_until

SIZE = 256 << 20


@pytest.fixture(params=[1, 2], ids=["one stripe", "two stripes"])
def rig(request: pytest.FixtureRequest) -> Iterator[ProcessRig]:
    rig = ProcessRig(stripes=request.param)
    yield rig
    rig.close()
    free_memory()


def source_at(address: int, size: int) -> Extents:
    return Extents.of(np.array([address], np.uint64), np.zeros(1, np.uint64), np.array([size], np.uint64))


def read(rig: ProcessRig, address: int, destination: np.ndarray, timeout_s: float = CALL_S) -> Progress:
    plan = Segments(rig.source(source_at(address, destination.size)), extents_of(destination))
    return rig.channel.read(plan).wait(deadline=time.monotonic() + timeout_s)


def test_the_owner_is_killed_in_the_middle(rig: ProcessRig) -> None:
    address = rig.map_sparse(SIZE)
    destination = memory_of(1, SIZE, None)
    result = in_thread(lambda: read(rig, address, destination))
    assert wait_until(lambda: destination[0, 1 << 20] == 0, CALL_S)
    rig.kill()
    watch = Stopwatch()
    progress = result()
    assert watch.within(1.0)
    assert progress.fault is None or progress.fault.kind is FaultKind.PEER_LOST
    seen = destination.copy()
    again = read(rig, address, memory_of(1, 100, None))
    assert again.fault is not None and again.fault.kind is FaultKind.PEER_LOST
    assert np.array_equal(seen, destination)


def test_the_owner_is_stopped_in_the_middle_and_runs_again(rig: ProcessRig) -> None:
    (address,) = rig.allocate([SIZE // 8], 5)
    destination = memory_of(1, SIZE // 8, None)
    assert read(rig, address, destination[:, :100]).fault is None
    rig.stop()
    watch = Stopwatch()
    progress = read(rig, address, destination, 0.5)
    assert watch.elapsed >= 0.4 and watch.within(0.9)
    assert progress.fault is not None and progress.fault.kind is FaultKind.TIMEOUT
    seen = destination.copy()
    rig.resume()
    fresh = memory_of(1, SIZE // 8, None)
    assert read(rig, address, fresh).fault is None
    assert np.array_equal(fresh[0], pattern(5, SIZE // 8))
    assert np.array_equal(seen, destination)


def test_the_deadline_passes_in_the_middle_and_the_next_read_is_right(rig: ProcessRig) -> None:
    address = rig.map_sparse(SIZE)
    destination = memory_of(1, SIZE, None)
    late = read(rig, address, destination, 0.01)
    assert late.fault is not None and late.fault.kind is FaultKind.TIMEOUT
    assert late.nbytes < SIZE
    seen = destination.copy()
    (small,) = rig.allocate([100], 3)
    fresh = memory_of(1, 100, None)
    assert read(rig, small, fresh).fault is None
    assert np.array_equal(fresh[0], pattern(3, 100))
    assert np.array_equal(seen, destination)
    assert wait_until(lambda: rig.owner.call("counts")["open"] == 0, CALL_S)


def test_a_refusal_carries_its_code_and_text(rig: ProcessRig) -> None:
    (address,) = rig.allocate([100], 3)
    rig.owner.call("refuse", code=77, text="not now")
    destination = memory_of(1, 100, None)
    progress = read(rig, address, destination)
    assert progress.fault is not None
    assert (progress.fault.kind, progress.fault.code, progress.fault.text) == (
        FaultKind.REFUSED,
        77,
        "not now",
    )
    assert (destination == 0xA5).all()
