"""Turns between the peers of one owner, counted in bytes: no clock decides."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from llm_datadist._core.limits import TURN_NBYTES
from llm_datadist._core.segments import Segments
from llm_datadist.testing.stream_owner import encode_extents
from llm_datadist.transports import tcp_reading
from llm_datadist.transports._sockets import send_now
from llm_datadist.transports.seam import PeerEndpoint, Progress
from llm_datadist.transports.tcp_channel import TcpChannel
from llm_datadist.transports.tcp_serving import ServedConnection
from tests.support.tcp_rig import CALL_S, MakeRig, Rig, extents_of, in_thread, memory_of
from tests.support.world import wait_until

TOKEN = b"b" * 16
READERS = 2
PULLS = 100


@contextmanager
def pulls_without_pause(rig: Rig) -> Iterator[None]:
    """The greedy peer, on ``READERS`` connections."""
    size = 256 << 20
    source, destination = memory_of(1, size, 1), memory_of(READERS, size, None)
    going = True

    def pull(at: int) -> Progress:
        progress = Progress(0)
        while going and progress.fault is None:
            progress = rig.read(
                extents_of(source), extents_of(destination[at : at + 1]), timeout_s=6 * CALL_S
            )
        return progress

    def puller(at: int) -> Callable[[], Progress]:
        return in_thread(lambda: pull(at))

    results = [puller(at) for at in range(READERS)]
    assert wait_until(lambda: rig.owner_channel.bytes_out > 4 * TURN_NBYTES, CALL_S)
    try:
        yield
    finally:
        going = False
        assert all(result().fault is None for result in results)


class Watch:
    """What the owner had sent to the greedy peer when the other one had asked, and when it was served."""

    def __init__(self, rig: Rig, modest: TcpChannel, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[int] = []
        self.served: list[int] = []
        feed = ServedConnection.feed

        def send_and_look(fd: int, data: bytes) -> int:
            sent = send_now(fd, data)
            if fd in [sock.fileno() for sock in modest.pool.sockets()]:
                self.asked.append(rig.owner_channel.bytes_out)  # a little late: never is too much counted
            return sent

        def feed_and_look(connection: ServedConnection, data: memoryview) -> None:
            if connection.link.token == TOKEN:
                self.served.append(rig.owner_channel.bytes_out)
            feed(connection, data)

        monkeypatch.setattr(tcp_reading, "send_now", send_and_look)
        monkeypatch.setattr(ServedConnection, "feed", feed_and_look)


def test_a_small_pull_waits_for_a_few_turns_of_another_peer_at_most(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(stripes=1)
    rig.owner.open(PeerEndpoint(2, b"", TOKEN, None, lambda n: None), deadline=0)
    modest = rig.reader.open(PeerEndpoint(3, b"", TOKEN, rig.port.address, lambda n: None), deadline=0)
    plan = Segments(encode_extents(extents_of(memory_of(1, 4096, 2))), extents_of(memory_of(1, 4096, None)))
    assert modest.read(plan).wait(deadline=math.inf).fault is None
    with pulls_without_pause(rig):
        watch = Watch(rig, modest, monkeypatch)
        for _ in range(PULLS):
            assert modest.read(plan).wait(deadline=math.inf).fault is None
    assert len(watch.asked) == len(watch.served) == PULLS
    waited = [served - asked for asked, served in zip(watch.asked, watch.served, strict=True)]
    # Each connection of the greedy peer may be in a turn when the request comes, and have one more before it.
    assert max(waited) <= 2 * READERS * TURN_NBYTES
    assert min(waited) >= 0
