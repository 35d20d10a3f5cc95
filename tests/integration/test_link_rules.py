"""Contract 4, sentence by sentence: what no row of the table of faults shows about links."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import llm_datadist as dd
from llm_datadist import LLMStatusCode
from llm_datadist._wire import session
from llm_datadist.testing.stopwatch import Stopwatch
from tests.support import actors
from tests.support.links import Engine
from tests.support.netns import namespace
from tests.support.pair import AT_ONCE, D_ID, P_ID, SUCCESS, Combo, Pair, Shape, make_pair, of_model
from tests.support.pool import Spawner
from tests.support.raw_links import RawPeer
from tests.support.sockets import is_closed_by_peer, refusing_address
from tests.support.which_combos import SHM_LATER_IN_A, TWO
from tests.support.world import World, wait_until

FAILED = LLMStatusCode.LLM_LINK_FAILED
TIMEOUT = LLMStatusCode.LLM_TIMEOUT
UNLINK_FAILED = LLMStatusCode.LLM_UNLINK_FAILED
MIB = 1 << 20
LISTEN = "0A"


# ---- who is linked -----------------------------------------------------------------------------------


@pytest.mark.rule("4.29")
def test_a_peer_that_is_not_initialised_is_no_peer(pair: Pair) -> None:
    pair.up(link=False)
    pair.p.call(actors.finalize)
    outcome = pair.d.attempt(actors.link, [(P_ID, pair.address)])
    assert outcome.value == (FAILED, [FAILED])
    assert outcome.took.within(AT_ONCE)


@pytest.mark.rule("4.26")
def test_an_address_without_a_route_fails_at_once(spawn: Spawner) -> None:
    with namespace() as net:
        peer = spawn(prefix=net.prefix)
        peer.call(actors.up, D_ID, actors.options())
        outcome = peer.attempt(actors.link, [(P_ID, ("192.0.2.1", 26000))])
        assert outcome.value == (FAILED, [FAILED])
        assert outcome.took.within(AT_ONCE)
        assert "unreachable" in peer.call(_link_error, P_ID)


def _link_error(w: World, cluster_id: int) -> str | None:
    return w.dist.link_error(cluster_id)  # type: ignore[no-any-return]


@pytest.mark.rule("4.16")
def test_why_it_was_not_linked_is_kept_until_the_next_success(pair: Pair) -> None:
    pair.up(link=False)
    assert pair.d.call(_link_error, P_ID) is None
    nobody = refusing_address()
    for _ in range(2):
        pair.d.call(actors.link, [(P_ID, nobody)])
        text = pair.d.call(_link_error, P_ID)
        assert f"cluster {P_ID}" in text and f"{nobody[0]}:{nobody[1]}" in text
    pair.d.call(actors.unlink, [P_ID])
    assert pair.d.call(_link_error, P_ID) == text
    pair.link()
    assert pair.d.call(_link_error, P_ID) is None


@pytest.mark.rule("4.10")
@pytest.mark.parametrize("attempts", [None, 3])
def test_link_retry_count_is_the_number_of_attempts(spawn: Spawner, attempts: int | None) -> None:
    """An address that accepts and hangs up is tried so often, and once without the option."""
    peer = spawn()
    more = {} if attempts is None else {"LinkRetryCount": str(attempts)}
    peer.call(actors.up, D_ID, actors.options(**more))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        dialling = peer.start(actors.link, [(P_ID, listener.getsockname())], 5000)
        count = 0
        listener.settimeout(0.05)
        while not dialling.done():
            with contextlib.suppress(TimeoutError):
                listener.accept()[0].close()
                count += 1
        assert dialling.result() == (FAILED, [FAILED])
    assert count == (attempts or 1)


def _link_from(w: World, local: tuple[str, int], address: tuple[str, int]) -> Any:
    info = dd.LLMClusterInfo()
    info.remote_cluster_id = P_ID
    info.append_local_ip_info(*local)
    info.append_remote_ip_info(*address)
    return w.dist.link_clusters([info], 3000)


@pytest.mark.rule("4.20")
def test_the_local_port_of_a_cluster_is_not_bound(spawn: Spawner) -> None:
    """Another process listens on it, and the address is not even one of this machine."""
    pair = make_pair(spawn, Combo("A", "auto")).up(link=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert pair.d.call(_link_from, taken.getsockname(), pair.address) == (SUCCESS, [SUCCESS])
    assert pair.d.call(actors.unlink, [P_ID]) == (SUCCESS, [SUCCESS])
    assert pair.d.call(_link_from, ("192.0.2.1", 1), pair.address) == (SUCCESS, [SUCCESS])
    assert pair.d.call(_listening) == []


@pytest.mark.rule("4.37")
def test_hundreds_of_links_of_one_engine() -> None:
    with Engine(1) as a, contextlib.ExitStack() as peers:
        for number in range(600):
            peer = peers.enter_context(RawPeer(a.address))
            peer.link(1, 10 + number, instance=number.to_bytes(16, "little"))
        assert len(a.service.links()) == 600
        with Engine(2) as b:
            assert b.service.dial([a.target], 3) == [SUCCESS]


# ---- ports -------------------------------------------------------------------------------------------


def _own_sockets() -> Iterator[list[str]]:
    inodes = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(f"/proc/self/fd/{fd}"))
    with open("/proc/self/net/tcp") as file:
        rows = [line.split() for line in file.readlines()[1:]]
    yield from (row for row in rows if f"socket:[{row[9]}]" in inodes)


def _listening(w: World) -> list[int]:
    return [int(row[1].split(":")[1], 16) for row in _own_sockets() if row[3] == LISTEN]


def _remote_ports(w: World) -> list[int]:
    """Remote ports of this process's TCP connections."""
    return [int(row[2].split(":")[1], 16) for row in _own_sockets() if row[3] != LISTEN]


@pytest.mark.rule("4.14")
@pytest.mark.parametrize("mode", ["A", "B"])
def test_control_and_data_share_the_one_listening_port(spawn: Spawner, mode: str) -> None:
    """Whoever reads: every connection goes from the dialler to the port that was given."""
    pair = make_pair(spawn, Combo(mode, "tcp")).up()
    for peer in (pair.p, pair.d):
        peer.call(actors.blocks_cache, "src", seed=4, model_id=0)
        peer.call(actors.blocks_cache, "dst")
    pair.d.call(actors.pull_blocks, of_model(0, P_ID), "dst", [1], [2])
    pair.p.call(actors.pull_blocks, of_model(0, D_ID), "dst", [1], [2])
    ports = pair.d.call(_remote_ports)
    assert len(ports) >= 2, "control and data"
    assert set(ports) == {pair.address[1]}
    assert pair.p.call(_listening) == [pair.address[1]]
    assert pair.d.call(_listening) == []


@pytest.mark.rule("3.67")
def test_tcp_connections_limits_the_data_connections_of_a_link(spawn: Spawner) -> None:
    pair = make_pair(spawn, Combo("A", "tcp")).up(timeout_ms=20_000, TcpConnections="1")
    shape = Shape(tensors=1, dim0=64, stride=MIB)
    pair.source(shape=shape)
    blocks = list(range(64))
    for name in ("one", "two", "three"):
        pair.destination(name, shape)
    running = [
        pair.d.start(actors.pull_blocks, of_model(0), name, blocks, blocks)
        for name in ("one", "two", "three")
    ]
    for one in running:
        one.result()
    assert len(pair.d.call(_remote_ports)) == 2, "one for control, one for data"
    pair.blocks_right(blocks, blocks, name="three")


def _movers(w: World) -> int:
    import threading

    return sum(t.name == "llm-datadist-mover" for t in threading.enumerate())


@pytest.mark.rule("3.66")
@pytest.mark.parametrize("threads", [1, 3])
def test_transfer_threads_is_the_number_of_movers(spawn: Spawner, threads: int) -> None:
    """The caller's thread is one of them."""
    pair = make_pair(spawn, Combo("A", "local")).up(timeout_ms=20_000, TransferThreads=str(threads))
    shape = Shape(tensors=2, dim0=64, stride=MIB)
    pair.source(shape=shape)
    pair.destination(shape=shape)
    blocks = list(range(64))
    pair.pull_blocks(blocks, blocks).ok()
    assert pair.d.call(_movers) == threads - 1
    pair.blocks_right(blocks, blocks)


@pytest.mark.rule("4.108")
def test_an_unfinished_handshake_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time itself, 10 s, is that of tests/unit/_wire/test_session.py."""
    monkeypatch.setattr(session, "HANDSHAKE_TIMEOUT_S", 0.4)
    with Engine(1) as a, socket.create_connection((a.address.host, a.address.port)) as silent:
        watch = Stopwatch()
        assert is_closed_by_peer(silent, 5.0)
        assert watch.elapsed >= 0.3 and watch.within(2.0)


# ---- how links end -----------------------------------------------------------------------------------


@pytest.mark.rule("1.36", "4.44")
@TWO
def test_unlink_of_a_peer_that_does_not_answer_drops_my_side(pair: Pair) -> None:
    pair.up(HeartbeatIntervalMs="5000")
    pair.p.stop()
    outcome = pair.d.attempt(actors.unlink, [P_ID], 1000)
    assert outcome.value == (TIMEOUT, [TIMEOUT])
    assert outcome.took.about(1.0)
    assert pair.d.call(actors.links) == []
    pair.p.cont()
    pair.link()


@pytest.mark.rule("4.43")
def test_unlink_of_a_peer_that_dies_meanwhile_drops_my_side(pair: Pair) -> None:
    pair.up(HeartbeatIntervalMs="5000")
    pair.p.stop()
    running = pair.asking(actors.unlink, [P_ID], 10_000)
    assert not running.done()
    pair.p.kill()
    assert running.result() == (UNLINK_FAILED, [UNLINK_FAILED])
    assert pair.d.call(actors.links) == []


def _unlink_bare(w: World, cluster_id: int, force: bool) -> Any:
    info = dd.LLMClusterInfo()
    info.remote_cluster_id = cluster_id
    return w.dist.unlink_clusters([info], 3000, force)


@pytest.mark.rule("4.41", "4.42")
@pytest.mark.parametrize("force", [False, True])
def test_unlink_needs_no_address(pair: Pair, force: bool) -> None:
    pair.up()
    assert pair.d.call(_unlink_bare, P_ID, force) == (SUCCESS, [SUCCESS])
    assert pair.d.call(actors.links) == []
    assert wait_until(lambda: pair.p.call(actors.links) == [], AT_ONCE)


@pytest.mark.rule("4.76")
def test_check_link_status_of_a_link_that_goes_down_meanwhile(pair: Pair) -> None:
    pair.up(timeout_ms=10_000, HeartbeatIntervalMs="5000")
    pair.p.stop()
    running = pair.asking(actors.check_link, P_ID)
    assert not running.done()
    watch = Stopwatch()
    pair.p.kill()
    running.outcome().expect(FAILED, P_ID)
    assert watch.within(AT_ONCE)


def _hold_the_gil(w: World, fifo: str) -> None:
    """Until somebody writes there."""
    fd = os.open(fifo, os.O_RDWR)
    ctypes.PyDLL(None).read(fd, ctypes.create_string_buffer(1), 1)
    os.close(fd)


def _states(w: World, state: str, within: float) -> bool:
    return wait_until(lambda: [str(i.state) for i in w.dist.links()] == [state], within)


@SHM_LATER_IN_A
@pytest.mark.rule("4.84", "4.88", "4.89")
def test_a_peer_that_holds_its_gil_is_silent_and_not_down(pair_a: Pair, tmp_path: Path) -> None:
    """A pull that it should answer waits meanwhile, and goes on when it is heard again."""
    pair = pair_a.up(timeout_ms=20_000, HeartbeatIntervalMs="200")
    pair.source()
    pair.destination()
    assert pair.d.call(_states, "up", 1.0)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    busy = pair.p.start(_hold_the_gil, str(fifo))
    assert pair.d.call(_states, "silent", 2.0)
    pull = pair.asking(actors.pull_blocks, of_model(0), "dst", [1], [2])
    assert not busy.done() and not pull.done()
    fifo.write_bytes(b"x")
    pull.result()
    busy.result()
    assert pair.d.call(_states, "up", 2.0)
    pair.blocks_right([1], [2])


# ---- what links() says -------------------------------------------------------------------------------


def _counts(w: World) -> tuple[int, int, float]:
    (info,) = w.dist.links()
    return info.bytes_in, info.bytes_out, info.since


@pytest.mark.rule("4.97")
def test_links_counts_bytes_and_says_since_when(pair: Pair) -> None:
    before = time.time()
    pair.up()
    after = time.time()
    pair.source()
    pair.destination(model_id=1)
    pair.pull_blocks([1, 2, 3], [4, 5, 6]).ok()
    pulled, pushed = 3 * 2 * 1024, 0
    if pair.combo.mode == "B":
        pair.p.call(actors.push_blocks, of_model(1, D_ID), "src", [1], [2])
        pushed = 2 * 1024
    assert pair.d.call(_counts)[:2] == (pulled + pushed, 0)
    told = pulled if pair.combo.mode == "A" else pushed
    assert wait_until(lambda: pair.p.call(_counts)[:2] == (0, told)), pair.p.call(_counts)
    for peer in (pair.p, pair.d):
        assert before - 1 <= peer.call(_counts)[2] <= after + 1
