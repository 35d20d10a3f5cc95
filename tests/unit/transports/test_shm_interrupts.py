"""Transport ``shm``: uses that are interrupted, or closed, before the peer's memory has come."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from llm_datadist._core.segments import Extents, Segments
from llm_datadist.testing.board import extents, soon
from llm_datadist.testing.stopwatch import Stopwatch
from llm_datadist.transports import shm_memory
from llm_datadist.transports.movers import Movers
from llm_datadist.transports.shm import ShmChannel, ShmTransport
from tests.support.local_pair import PROOF, Loop
from tests.support.shm_pair import MIB, Reader, Shared, endpoint, settle, transport
from tests.support.world import wait_until

WAIT_S = 10


@pytest.fixture
def area() -> Iterator[Shared]:
    with closing(Shared(MIB)) as area:
        yield area


@pytest.fixture
def loop() -> Iterator[Loop]:
    with closing(Loop()) as loop:
        yield loop


@pytest.fixture
def reader(area: Shared) -> Iterator[ShmTransport]:
    with closing(transport([area.area])) as reader:
        yield reader


def opened(reader: ShmTransport, blob: bytes) -> ShmChannel:
    channel = reader.open(endpoint(blob), deadline=0)
    settle(channel)
    return channel


def mapped(name: str) -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if name in line]


def test_interrupts_at_the_first_use_leave_a_usable_channel(area: Shared, loop: Loop) -> None:
    """Wherever they come: the answer is neither lost nor waited for without end, and nothing stays open."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    source = extents([area.area.address], [(0, 8)])
    times = random.Random(1)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with closing(transport([area.area], loop=loop)) as owned, closing(transport([area.area])) as reader:
            opened(reader, owned.endpoint(PROOF)).close()  # what is made once is there
            assert wait_until(lambda: not owned._giver._readers, WAIT_S)
            fds, maps, interrupted = len(os.listdir("/proc/self/fd")), len(mapped("memfd:test")), 0
            for _ in range(300):
                channel = reader.open(endpoint(owned.endpoint(PROOF)), deadline=0)
                try:
                    signal.setitimer(signal.ITIMER_REAL, times.uniform(1e-5, 6e-4))
                    while True:
                        channel.covers(source)
                        channel.read(Segments(source, source)).wait(deadline=soon())
                except KeyboardInterrupt:
                    interrupted += 1
                assert _used_by_another_thread(channel, source)
                channel.close()
            del channel
            assert interrupted == 300
            assert wait_until(lambda: not owned._giver._readers, WAIT_S)
            assert (len(os.listdir("/proc/self/fd")), len(mapped("memfd:test"))) == (fds, maps)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _used_by_another_thread(channel: ShmChannel, source: Extents) -> bool:
    covered: list[bool] = []
    other = threading.Thread(
        target=lambda: covered.append(channel.settle(deadline=soon()) and channel.covers(source))
    )
    other.start()
    other.join(WAIT_S)
    return covered == [True]


def test_an_interrupt_between_taking_a_hold_and_its_use_does_not_keep_it(
    area: Shared, loop: Loop, reader: ShmTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(transport([area.area], loop=loop)) as owned:
        channel = opened(reader, owned.endpoint(PROOF))
        maps, keep = len(mapped("memfd:test")), shm_memory.PeerMemory.keep

        def interrupted(memory: shm_memory.PeerMemory, user: object) -> bool:
            keep(memory, user)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(shm_memory.PeerMemory, "keep", interrupted)
            with pytest.raises(KeyboardInterrupt):
                channel.read_word(area.area.address, deadline=soon())
        gc.collect()
        channel.close()
        assert len(mapped("memfd:test")) == maps - 1


def test_a_channel_closed_before_the_answer_leaves_nothing(area: Shared, loop: Loop) -> None:
    """Whoever waits for it is told at once."""
    with (
        closing(Reader([area.area], Movers(0), deaf=True)) as reader,
        closing(transport([area.area])) as silent,
    ):
        fds = len(os.listdir("/proc/self/fd"))
        channel = reader.open(endpoint(silent.endpoint(PROOF)), deadline=0)
        watch, ended = Stopwatch(), list[float]()

        def wait() -> None:
            channel.settle(deadline=time.monotonic() + 60)
            ended.append(time.monotonic())

        waiting = threading.Thread(target=wait)
        waiting.start()
        assert wait_until(lambda: bool(channel.memory._looked._waiting), WAIT_S)
        channel.close()
        waiting.join()
        assert watch.within(WAIT_S, until=ended[0]) and len(os.listdir("/proc/self/fd")) == fds
