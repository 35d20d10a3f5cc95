"""Peers that do not answer UCX: how long their opening keeps the control thread, and a pull its caller."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from llm_datadist import LLMStatusCode
from llm_datadist.testing.stopwatch import Stopwatch, Taken
from llm_datadist.transports.nixl import NixlTransport
from tests.support import actors
from tests.support.netns import Namespace, joined
from tests.support.nixl_engines import NIXL_B, OVER_TCP, QUIET, net_pair
from tests.support.nixl_pair import need_nixl
from tests.support.pair import AT_ONCE, D_ID, P_ID, SUCCESS, Pair, of_model
from tests.support.peers import Peer
from tests.support.pool import Spawner
from tests.support.world import World

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

FAILED = LLMStatusCode.LLM_LINK_FAILED
OTHER_ID = 3
BOUND_S = 1.0  # of one opening
MARGIN_S = 0.3  # to end an agent, on a machine with other work


@pytest.fixture
def spawn(_leaves_nothing: None) -> Iterator[Spawner]:
    need_nixl()
    spawner = Spawner(QUIET)
    yield spawner
    left = spawner.close()
    assert not left, "; ".join(left)


def _ip(net: Namespace, *args: str) -> None:
    subprocess.run(["ip", "-n", net.name, *args], check=True, capture_output=True)


def _second_pair(a: Namespace, b: Namespace) -> list[str]:
    """Another veth pair, on which everything is lost: each end sends to an address that the other has not."""
    names = [f"w{net.name}" for net in (a, b)]
    _ip(a, "link", "add", names[0], "type", "veth", "peer", "name", names[1], "netns", b.name)
    for at, (net, name) in enumerate(zip((a, b), names, strict=True)):
        _ip(net, "addr", "add", f"10.78.0.{at + 1}/24", "dev", name)
        _ip(net, "link", "set", name, "up")
        _ip(net, "neigh", "replace", f"10.78.0.{2 - at}", "lladdr", "02:00:00:00:00:09", "dev", name)
    return names


def _time_opens(w: World) -> None:
    opened = w.extras["opens"] = []
    plain = NixlTransport.open

    def timed(transport: NixlTransport, peer: Any, *, deadline: float) -> Any:
        watch = Stopwatch()
        try:
            return plain(transport, peer, deadline=deadline)
        finally:
            opened.append(watch.took())

    NixlTransport.open = timed  # type: ignore[method-assign]


def _opens(w: World) -> list[Taken]:
    return list(w.extras["opens"])


def _error(w: World) -> str:
    return str(w.dist.link_error(P_ID))


def test_an_opening_that_nobody_answers_ends_within_a_second(spawn: Spawner) -> None:
    """Meanwhile another link of the same engine lives, although it is declared silent soon."""
    with joined(slow=False) as nets:
        lossy = _second_pair(*nets)
        p, d, other = (
            spawn(prefix=net.prefix, env={**OVER_TCP, "UCX_NET_DEVICES": device})
            for net, device in ((nets[0], lossy[0]), (nets[1], f"{lossy[1]},lo"), (nets[1], "lo"))
        )
        quick = {"HeartbeatIntervalMs": "200", "LinkTimeoutMs": "1500"}
        address = p.call(actors.up, P_ID, actors.options("A", "nixl", f"{nets[0].address}:0", **quick))
        near = other.call(actors.up, OTHER_ID, actors.options("A", "nixl", "127.0.0.1:0", **quick))
        d.call(actors.up, D_ID, actors.options("A", "nixl", None, **quick))
        d.call(_time_opens)
        assert d.call(actors.link, [(OTHER_ID, near)]) == (SUCCESS, [SUCCESS])
        for peer in (p, d):
            peer.call(_time_opens)
        outcome = d.attempt(actors.link, [(P_ID, address)], 5000)
        assert outcome.ok()[1] == [FAILED]
        took = p.call(_opens)[-1:] + d.call(_opens)[-1:]
        assert all(one.within(BOUND_S + MARGIN_S) for one in took), took
        text = d.call(_error)
        assert "nixl: a first read with NIXL failed: the time ran out" in text, text
        other.call(actors.blocks_cache, "src", seed=1, model_id=0)
        d.call(actors.blocks_cache, "dst")
        assert d.attempt(actors.pull_blocks, of_model(0, OTHER_ID), "dst", [1], [2]).took.within(AT_ONCE)
        assert [name for _, name, _ in d.call(actors.links)] == ["nixl"]


def test_a_good_opening_is_quick(spawn: Spawner) -> None:
    peers = [spawn(), spawn()]
    address = peers[0].call(actors.up, P_ID, actors.options("A", "nixl", "127.0.0.1:0"))
    peers[1].call(actors.up, D_ID, actors.options("A", "nixl"))
    for peer in peers:
        peer.call(_time_opens)
    for _ in range(3):
        assert peers[1].call(actors.link, [(P_ID, address)]) == (SUCCESS, [SUCCESS])
        peers[1].call(actors.unlink, [P_ID])
    assert all(took.within(BOUND_S / 2) for took in _all_opens(peers))
    for peer in peers:
        peer.kill()  # its class was changed


def _all_opens(peers: list[Peer]) -> list[Taken]:
    return [took for peer in peers for took in peer.call(_opens)]


# ---- a link whose peer is no longer there ------------------------------------------------------------------------


def _cut(nets: tuple[Namespace, Namespace]) -> None:
    """From now on everything between the two is lost, without a sign."""
    for net, other in (nets, nets[::-1]):
        _ip(net, "neigh", "replace", other.address, "lladdr", "02:00:00:00:00:09", "dev", net.device)


def _drop_sessions(w: World) -> None:
    """The connections of earlier reads are gone, as after one that was cut."""
    (link,) = w.dist._engine._state.links.links()
    channel = link.context.ways[0].channel
    with channel._making:
        channel._drop_made()


@pytest.mark.parametrize("connected", [True, False])
def test_t2_a_pull_from_a_host_that_is_gone_ends_in_time(spawn: Spawner, connected: bool) -> None:
    """Also one that must connect anew, for which the system would wait minutes."""
    with net_pair(spawn, NIXL_B, slow=False) as pair:
        pair.up_there(1000, 1000)
        pair.source()
        pair.destination()
        pair.pull_blocks([1], [2]).ok()
        pair.d.call(actors.refill, "dst", None)
        if not connected:
            pair.d.call(_drop_sessions)
        _cut(pair.nets)
        outcome = pair.pull_blocks([1], [2])
        assert outcome.code == LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT, outcome
        assert outcome.took.about(1.0), outcome
        pair.unchanged()


@pytest.mark.parametrize("env", [{}, OVER_TCP], ids=["host", "tcp"])
def test_t2_a_stopped_owner_in_mode_b(spawn: Spawner, env: dict[str, str]) -> None:
    """It must answer, unless UCX has the kernel copy, which needs nobody's answer."""
    pair = Pair(spawn(env=env), spawn(env=env), NIXL_B).up(timeout_ms=1000, HeartbeatIntervalMs="5000")
    pair.source()
    pair.destination()
    pair.pull_blocks([1], [2]).ok()
    pair.d.call(actors.refill, "dst", None)
    pair.p.stop()
    outcome = pair.pull_blocks([3], [4])
    first = pair.d.call(actors.digest, "dst")
    pair.p.cont()
    if outcome.code == LLMStatusCode.LLM_SUCCESS and not env:
        pair.blocks_right([3], [4])
    else:
        assert outcome.code == LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT and outcome.took.about(1.0), outcome
    actors.pause(0.5)
    assert pair.d.call(actors.digest, "dst") == first, "something was written after the pull had ended"
    pair.d.call(actors.refill, "dst", None)
    pair.pull_blocks([5], [6]).ok()
    pair.blocks_right([5], [6])
