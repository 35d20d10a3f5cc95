"""The data connections of a TCP link: how many, whose, what becomes of dead ones; fork."""

from __future__ import annotations

import os
import select
import socket
import threading
import time

import numpy as np
import pytest

from llm_datadist._core.segments import Segments
from llm_datadist.testing.stopwatch import Stopwatch
from llm_datadist.testing.stream_owner import ExtentsSource, Port, encode_extents, first_frame
from llm_datadist.transports.seam import FaultKind, PeerEndpoint, Progress, TransportUnavailable
from llm_datadist.transports.tcp import TcpTransport
from llm_datadist.transports.tcp_frames import encode_request
from tests.support.tcp_rig import (
    CALL_S,
    MakeRig,
    Rig,
    extents_of,
    in_thread,
    memory_of,
)
from tests.support.world import wait_until


def test_a_dead_idle_connection_is_replaced(rig: Rig) -> None:
    source = memory_of(1, 10, 1)
    assert rig.read(extents_of(source), extents_of(memory_of(1, 10, None))).fault is None
    rig.owner._server.drop(rig.owner_channel)
    assert wait_until(lambda: not rig.owner._server._connections, CALL_S)
    destination = memory_of(1, 10, None)
    assert rig.read(extents_of(source), extents_of(destination)).fault is None
    assert np.array_equal(source, destination)


def test_a_slow_reader_holds_up_nobody(make_rig: MakeRig) -> None:
    """Somebody asks for much and never reads it: other reads of the same link go on."""
    rig = make_rig()
    source, destination = memory_of(1, 64 << 20, 1), memory_of(1, 1 << 20, None)
    with socket.create_connection(rig.port.address) as slow:
        selector = encode_extents(extents_of(source))
        request = encode_request(1, 0, source.size, selector) + selector
        slow.sendall(first_frame(rig.token, True) + request)
        assert wait_until(lambda: rig.source.open_count == 1, CALL_S)
        for _ in range(20):
            assert (
                rig.read(extents_of(source[:, : 1 << 20]), extents_of(destination), timeout_s=2).fault is None
            )
        assert rig.source.open_count == 1
        cpu = time.process_time()
        threading.Event().wait(0.3)
        assert time.process_time() - cpu < 0.15, "the serving thread spins"


@pytest.mark.parametrize("reader_dials", [True, False])
def test_connections_grow_on_demand_and_not_beyond_the_limit(make_rig: MakeRig, reader_dials: bool) -> None:
    rig = make_rig(reader_dials=reader_dials, connections=2)
    big, small = memory_of(1, 48 << 20, 1), memory_of(1, 100, 2)
    results = [in_thread(lambda: rig.read(extents_of(big), extents_of(memory_of(1, 48 << 20, None))))]
    results += [
        in_thread(lambda: rig.read(extents_of(small), extents_of(memory_of(1, 100, None)))) for _ in range(6)
    ]
    assert all(result().fault is None for result in results)
    assert 1 <= len(rig.channel.pool.sockets()) <= 2
    if not reader_dials:
        assert 1 <= sum(rig.asked) <= 2


def test_a_read_that_finds_no_connection_waits_until_its_deadline(
    make_rig: MakeRig, reader: TcpTransport
) -> None:
    asked: list[int] = []
    channel = reader.open(PeerEndpoint(1, b"", b"t" * 16, None, asked.append), deadline=0)
    watch = Stopwatch()
    progress = channel.read(Segments(b"x", extents_of(memory_of(1, 8, None)))).wait(
        deadline=watch.began + 0.2
    )
    assert watch.elapsed >= 0.15 and watch.within(0.7)
    assert progress.fault is not None and progress.fault.kind is FaultKind.TIMEOUT
    assert asked == [1]


def test_the_first_read_after_open_is_prompt(make_rig: MakeRig) -> None:
    source = memory_of(1, 4096, 1)
    for reader_dials in (True, False):
        rig = make_rig(reader_dials=reader_dials)
        watch = Stopwatch()
        assert rig.read(extents_of(source), extents_of(memory_of(1, 4096, None))).fault is None
        assert watch.within(0.5)  # 50 ms on a machine that does nothing else


def test_a_connection_of_an_unknown_link_is_closed(rig: Rig) -> None:
    with socket.create_connection(rig.port.address) as sock:
        sock.sendall(first_frame(b"?" * 16, True))
        sock.settimeout(CALL_S)
        assert sock.recv(1) == b""


@pytest.mark.parametrize("peer_reads", [True, False])
def test_g16_the_side_that_dialled_a_link_takes_no_connection_of_it_in(rig: Rig, peer_reads: bool) -> None:
    """Not even of one that knows the secret: data connections are dialled by the side that dialled the link."""
    assert rig.channel.dialled
    left, right = socket.socketpair()
    with left:
        rig.reader.adopt(right, rig.token, peer_reads, b"")
        left.settimeout(CALL_S)
        assert left.recv(1) == b""


def test_an_owner_that_speaks_unasked_is_cut_off(rig: Rig) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        left = socket.create_connection(listener.getsockname())
        right, _ = listener.accept()
    with left:
        rig.owner.adopt(right, rig.token, False, b"surprise")
        assert left.recv(1) == b""


def test_connections_that_nobody_asked_for_are_kept_up_to_the_limit(make_rig: MakeRig) -> None:
    rig = make_rig(reader_dials=False, connections=2)
    socks = [socket.create_connection(rig.port.address, timeout=CALL_S) for _ in range(4)]
    for sock in socks:
        sock.sendall(first_frame(rig.token, False))
    closed = [sock for sock in socks if select.select([sock], [], [], 0.3)[0]]
    assert len(closed) == 2 and all(sock.recv(1) == b"" for sock in closed)
    assert len(rig.channel.pool.sockets()) == 2
    for sock in socks:
        sock.close()


def test_one_link_is_opened_once(rig: Rig) -> None:
    peer = PeerEndpoint(1, b"", rig.token, rig.port.address, lambda n: None)
    with pytest.raises(ValueError, match="already"):
        rig.reader.open(peer, deadline=0)
    rig.reader.close()
    with pytest.raises(TransportUnavailable, match="closed"):
        rig.reader.open(PeerEndpoint(1, b"", b"u" * 16, rig.port.address, lambda n: None), deadline=0)


def test_both_ends_of_a_link_in_one_transport() -> None:
    source = ExtentsSource()
    transport = TcpTransport(source, first_frame)
    port = Port(transport)
    token = b"s" * 16
    dialled = transport.open(PeerEndpoint(1, b"", token, port.address, lambda n: None), deadline=0)
    accepted = transport.open(PeerEndpoint(1, b"", token, None, dialled.dial_for_peer), deadline=0)
    memory = memory_of(1, 100, 1)
    for channel in (dialled, accepted):
        destination = memory_of(1, 100, None)
        plan = Segments(encode_extents(extents_of(memory)), extents_of(destination))
        assert channel.read(plan).wait(deadline=time.monotonic() + CALL_S).fault is None
        assert np.array_equal(memory, destination)
    transport.close()
    port.close()


def test_both_sides_read_at_the_same_time() -> None:
    """As a pull and a push do on one link: neither waits for the other to end."""
    token, transports = b"s" * 16, [TcpTransport(ExtentsSource(), first_frame) for _ in range(2)]
    port = Port(transports[1])
    dialled = transports[0].open(PeerEndpoint(1, b"", token, port.address, lambda n: None), deadline=0)
    accepted = transports[1].open(PeerEndpoint(0, b"", token, None, dialled.dial_for_peer), deadline=0)
    size = 64 << 20
    sources = [memory_of(1, size, seed) for seed in (1, 2)]
    targets = [memory_of(1, size, None) for _ in range(2)]
    both = threading.Barrier(2)

    def read(at: int) -> Progress:
        channel = (dialled, accepted)[at]
        plan = Segments(encode_extents(extents_of(sources[at])), extents_of(targets[at]))
        both.wait(CALL_S)
        progress = channel.read(plan).wait(deadline=time.monotonic() + 3 * CALL_S)
        both.wait(3 * CALL_S)
        return progress

    results = [in_thread(lambda: read(0)), in_thread(lambda: read(1))]
    assert [result().fault for result in results] == [None, None]
    assert all(map(np.array_equal, sources, targets))
    assert dialled.bytes_out == accepted.bytes_in == size
    for transport in transports:
        transport.close()
    port.close()


def test_nothing_is_kept_of_a_read_that_is_over(rig: Rig) -> None:
    source = memory_of(1, 64 << 20, 1)
    for timeout_s in (CALL_S, 0.004):
        rig.read(extents_of(source), extents_of(memory_of(1, 64 << 20, None)), timeout_s=timeout_s)
        assert not rig.channel.pool._busy
        assert rig.channel.pool._open == {connection.sock for connection in rig.channel.pool._idle}


def test_no_thread_before_the_first_connection_and_none_after_close(make_rig: MakeRig) -> None:
    rig = make_rig()
    assert "llm-datadist-tcp" not in [t.name for t in threading.enumerate()]
    source = memory_of(1, 10, 1)
    rig.read(extents_of(source), extents_of(memory_of(1, 10, None)))
    assert "llm-datadist-tcp" in [t.name for t in threading.enumerate()]
    rig.owner.close()
    assert "llm-datadist-tcp" not in [t.name for t in threading.enumerate()]


def test_a_forked_child_closes_its_copies_and_the_parent_goes_on(rig: Rig) -> None:
    source = memory_of(1, 10, 1)
    assert rig.read(extents_of(source), extents_of(memory_of(1, 10, None))).fault is None
    (kept,) = rig.channel.pool.sockets()
    fd = kept.fileno()
    pid = os.fork()
    if pid == 0:
        try:
            rig.reader.close_after_fork()
            rig.owner.close_after_fork()
            os.fstat(fd)
            os._exit(1)
        except OSError:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert rig.read(extents_of(source), extents_of(memory_of(1, 10, None))).fault is None
    assert rig.channel.pool.sockets() == [kept]
