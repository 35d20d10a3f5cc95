"""switch_role (contract section 4): where the engine listens afterwards, and when it is refused."""

from __future__ import annotations

import socket
from typing import Any

import pytest

import llm_datadist as dd
from llm_datadist import LLMStatusCode
from tests.support import actors
from tests.support.pair import D_ID, P_ID, SUCCESS, Combo, Pair, make_pair
from tests.support.pool import Spawner
from tests.support.rank_tables import free_ports, on_loopback
from tests.support.world import World, wait_until

EXIST, FAILED = LLMStatusCode.LLM_EXIST_LINK, LLMStatusCode.LLM_FAILED


def switch(w: World, role: str, listen: str | None = None) -> Any:
    """switch_role; where it listens then, and its role."""
    options = None if listen is None else {"llm.listenIpInfo": listen, "llm.SyncKvCacheWaitTime": "x"}
    w.dist.switch_role(dd.LLMRole[role], options)
    return w.dist.listen_address, w.dist.role.name


def _refused(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1.0).close()
    except ConnectionRefusedError:
        return True
    return False


@pytest.mark.rule("4.79", "4.81", "4.82")
def test_section_4_it_listens_where_the_options_say(spawn: Spawner) -> None:
    pair = make_pair(spawn, Combo("B", "auto")).up(link=False)
    address, port = pair.address
    pair.source()
    pair.destination()
    listen = f"{address}:{port}"
    assert pair.p.call(switch, "PROMPT", listen) == ((address, port), "PROMPT")
    assert pair.p.call(switch, "PROMPT", "127.0.0.2:0")[0][0] == "127.0.0.2"
    assert _refused(port)
    assert pair.p.call(switch, "DECODER", listen) == ((address, port), "DECODER")
    pair.link()
    pair.pull_blocks([1], [2]).ok()
    pair.blocks_right([1], [2])


@pytest.mark.rule("4.7", "4.80", "4.83")
def test_section_4_without_the_option_it_stops_listening_and_roles_change_nothing(spawn: Spawner) -> None:
    pair = make_pair(spawn, Combo("B", "auto")).up(link=False)
    assert pair.p.call(switch, "DECODER") == (None, "DECODER")
    assert _refused(pair.address[1])
    back, _ = pair.d.call(switch, "DECODER", "127.0.0.1:0")
    assert pair.p.call(actors.link, [(D_ID, back)]) == (SUCCESS, [SUCCESS])
    pair.source()
    pair.destination()
    pair.pull_blocks([1], [2]).ok()
    pair.blocks_right([1], [2])
    assert pair.d.call(_role_of_peer) == int(dd.LLMRole.DECODER)


def _role_of_peer(w: World) -> int:
    return int(w.dist._engine._state.links.links()[0].identity.role)


@pytest.mark.rule("4.78")
@pytest.mark.parametrize("side", ["p", "d"])
def test_section_4_any_live_link_refuses_it(pair_of: Any, side: str) -> None:
    pair: Pair = pair_of("A", "auto").up()
    peer, other = (pair.p, D_ID) if side == "p" else (pair.d, P_ID)
    before = peer.call(actors.links)
    peer.attempt(switch, "MIX", "127.0.0.1:0").expect(EXIST, f"cluster {other}", "unlink")
    assert peer.call(actors.links) == before
    pair.d.call(actors.check_link, P_ID)
    assert pair.d.call(actors.unlink, [P_ID]) == (SUCCESS, [SUCCESS])
    assert wait_until(lambda: pair.p.call(actors.links) == [])
    assert peer.call(switch, "MIX", "127.0.0.1:0")[1] == "MIX"


def test_section_4_a_killed_peer_is_no_live_link(pair_of: Any) -> None:
    pair: Pair = pair_of("A", "auto").up()
    pair.d.kill()
    assert wait_until(lambda: pair.p.call(actors.links) == [])
    assert pair.p.call(switch, "DECODER") == (None, "DECODER")


def test_an_address_that_cannot_be_had_changes_nothing(spawn: Spawner) -> None:
    pair = make_pair(spawn, Combo("A", "auto")).up(link=False, d_listens=True)
    address, port = pair.address
    pair.d.attempt(switch, "PROMPT", f"{address}:{port}").expect(FAILED, f"{address}:{port}", "in use")
    pair.d.attempt(switch, "PROMPT", "192.0.2.1:0").expect(FAILED, "192.0.2.1")
    back, role = pair.d.call(_where)
    assert role == "MIX"
    assert pair.p.call(actors.link, [(D_ID, back)]) == (SUCCESS, [SUCCESS])


def _where(w: World) -> Any:
    return w.dist.listen_address, w.dist.role.name


def test_a_comm_keeps_its_own_address(spawn: Spawner) -> None:
    peer = spawn()
    peer.call(actors.up, P_ID, actors.options(listen="127.0.0.1:0"))
    ports = free_ports(2)
    peer.call(_comm, on_loopback(*ports))
    assert peer.call(switch, "PROMPT")[0] == ("127.0.0.1", ports[0])


def _comm(w: World, table: str) -> int:
    return int(w.dist.link("c", {P_ID: 0, D_ID: 1}, table))
