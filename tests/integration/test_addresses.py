"""Rows N: addresses and ports."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from llm_datadist import LLMStatusCode
from tests.support import actors, other_user
from tests.support.netns import namespace
from tests.support.pair import D_ID, P_ID, SUCCESS, Combo, Pair, make_pair
from tests.support.pool import Spawner
from tests.support.world import World

FAILED = LLMStatusCode.LLM_FAILED
LOCALHOST_V4 = 0x0100007F


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


MEETING = [
    ("[::1]:0", "::1"),
    ("localhost:0", "localhost"),
    ("127.0.0.1:0", "localhost"),
    ("127.0.0.1:0", "127.0.0.1"),
    ("127.0.0.1:0", LOCALHOST_V4),
]


@pytest.mark.rule("3.29", "3.30", "4.3", "4.95")
@pytest.mark.parametrize(("listen", "dial"), MEETING, ids=str)
def test_n1_each_form_of_address_that_can_meet(pair: Pair, listen: str, dial: Any) -> None:
    if "::1" in listen and not _has_ipv6():
        pytest.skip("this machine has no IPv6 loopback")
    mode, backend = pair.combo.mode, pair.combo.backend
    _, port = pair.p.call(actors.up, P_ID, actors.options(mode, backend, listen))
    assert port > 0
    pair.d.call(actors.up, D_ID, actors.options(mode, backend))
    assert pair.d.call(actors.link, [(P_ID, (dial, port))]) == (SUCCESS, [SUCCESS])
    pair.source()
    pair.destination()
    pair.pull_blocks([1], [2]).ok()
    pair.blocks_right([1], [2])


@pytest.mark.rule("4.3")
def test_n1_the_tuple_form(pair: Pair) -> None:
    pair.up(link=False)
    assert pair.d.call(_link_by_tuple, pair.address) == (SUCCESS, [SUCCESS])


def _link_by_tuple(w: World, address: tuple[str, int]) -> Any:
    info = actors.cluster(P_ID)
    info.append_remote_ip_info(tuple(address))  # type: ignore[call-arg]
    return w.dist.link_clusters([info])


def test_n1_a_namespace_without_any_ipv4_address(spawn: Spawner) -> None:
    with namespace() as net:
        p, d = spawn(prefix=_without_ipv4(net)), spawn(prefix=net.prefix)
        pair = Pair(p, d, Combo("A", "tcp"))
        _, port = p.call(actors.up, P_ID, actors.options("A", "tcp", "[::1]:0"))
        d.call(actors.up, D_ID, actors.options("A", "tcp"))
        assert d.call(actors.link, [(P_ID, ("::1", port))]) == (SUCCESS, [SUCCESS])
        pair.source()
        pair.destination()
        pair.pull_blocks([1], [2]).ok()
        pair.blocks_right([1], [2])


def _without_ipv4(net: Any) -> tuple[str, ...]:
    script = 'ip addr del 127.0.0.1/8 dev lo; exec "$@"'
    return (*net.prefix, "sh", "-c", script, "sh")


@pytest.mark.rule("3.13")
def test_n2_two_inits_on_one_port(spawn: Spawner) -> None:
    first, second = spawn(), spawn()
    _, port = first.call(actors.up, P_ID, actors.options(listen="127.0.0.1:0"))
    outcome = second.attempt(actors.up, D_ID, actors.options(listen=f"127.0.0.1:{port}"))
    outcome.expect(FAILED, f"127.0.0.1:{port}", "in use")
    assert outcome.took.within(1.0)
    assert second.call(_init_again)[1] > 0


def _init_again(w: World) -> Any:
    w.dist.init(actors.options(listen="127.0.0.1:0"))
    return w.dist.listen_address


def test_n2_a_killed_process_frees_its_port_at_once(pair: Pair, spawn: Spawner) -> None:
    pair.up()
    fresh = spawn()
    pair.p.kill()
    values = actors.options(pair.combo.mode, pair.combo.backend, f"127.0.0.1:{pair.address[1]}")
    outcome = fresh.attempt(actors.up, P_ID, values)
    assert outcome.ok()[1] == pair.address[1]
    assert outcome.took.within(1.0)


@pytest.mark.rule("3.13")
def test_n2_an_address_that_is_not_local(spawn: Spawner) -> None:
    outcome = spawn().attempt(actors.up, P_ID, actors.options(listen="192.0.2.1:0"))
    outcome.expect(FAILED, "192.0.2.1")
    assert outcome.took.within(1.0)


@pytest.mark.parametrize("backend", ["local", "tcp", "shm"])
def test_n4_no_route_and_no_name_service_are_needed(spawn: Spawner, backend: str) -> None:
    with namespace() as net:
        pair = Pair(spawn(prefix=net.prefix), spawn(prefix=net.prefix), Combo("A", backend))
        for peer, cluster_id, listen in ((pair.p, P_ID, "127.0.0.1:0"), (pair.d, D_ID, None)):
            outcome = peer.attempt(actors.up, cluster_id, actors.options("A", backend, listen))
            outcome.ok()
            assert outcome.took.within(1.0)
            pair.address = pair.address or outcome.value
        pair.link()
        pair.source()
        pair.destination()
        pair.pull_blocks([1], [2]).ok()
        pair.blocks_right([1], [2])


@other_user.needs_root
@pytest.mark.rule("3.40", "4.96")
@pytest.mark.rule("S.10", "S.13", "S.17")
def test_p2_the_fast_way_is_not_permitted(spawn: Spawner) -> None:
    p = spawn()
    d = spawn(env={"HOME": None})
    d.call(other_user.become_in)
    pair = Pair(p, d, Combo("B", "auto"))
    pair.address = p.call(actors.up, P_ID, actors.options("B", "auto", "127.0.0.1:0"))
    d.call(actors.watch_logs)
    d.call(actors.up, D_ID, actors.options("B", "auto"))
    pair.link()
    pair.source()
    pair.destination()
    pair.pull_blocks([1], [2]).ok()
    pair.blocks_right([1], [2])
    infos = [r for r in d.call(actors.log_records, "INFO") if "local" in r[2]]
    assert len(infos) == 1, infos
    (link,) = d.call(_link_reasons)
    assert link[0] == "tcp"
    assert "local" in link[1]


def _link_reasons(w: World) -> list[tuple[str, str]]:
    return [(i.transport, str(i.reasons)) for i in w.dist.links()]


@other_user.needs_root
@pytest.mark.rule("3.41", "4.34")
@pytest.mark.rule("R.20")
def test_p2_a_transport_asked_for_by_name_is_not_replaced(spawn: Spawner) -> None:
    p = spawn()
    d = spawn(env={"HOME": None})
    d.call(other_user.become_in)
    address = p.call(actors.up, P_ID, actors.options("B", "local", "127.0.0.1:0"))
    d.call(actors.up, D_ID, actors.options("B", "local"))
    d.call(actors.watch_logs)
    failed = LLMStatusCode.LLM_LINK_FAILED
    assert d.call(actors.link, [(P_ID, address)]) == (failed, [failed])
    (record,) = d.call(actors.log_records, "WARNING")
    assert "local" in record[2]
    assert d.call(actors.links) == []


@pytest.mark.rule("3.31", "4.95")
def test_the_listen_address_is_none_without_a_listener(spawn: Spawner) -> None:
    assert spawn().call(actors.up, D_ID, actors.options()) is None


@pytest.mark.rule("3.41")
def test_p1_all_transports_are_chosen_by_name(spawn: Spawner) -> None:
    for backend in ("local", "tcp", "shm"):
        pair = make_pair(spawn, Combo("A", backend)).up()
        assert [t for _, t, _ in pair.d.call(actors.links)] == [backend]
        pair.d.call(actors.reset)
        pair.p.call(actors.reset)
