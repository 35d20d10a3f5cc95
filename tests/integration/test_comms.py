"""The two-sided link (contract section 4; rows L1, L2, L3): rank tables, lateness, addresses."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llm_datadist import LLMStatusCode
from llm_datadist.testing.stopwatch import Stopwatch
from tests.support import actors
from tests.support.comms import (
    FAILED,
    OK,
    PREPARING,
    comm,
    late_start,
    leave,
    link_both,
    link_error,
    listen_address,
    settled,
    status,
    up_both,
)
from tests.support.pair import AT_ONCE, D_ID, P_ID, SUCCESS, Combo, Pair, make_pair
from tests.support.pool import Spawner
from tests.support.rank_tables import device, free_ports, on_loopback, rank_table, server
from tests.support.which_combos import TWO
from tests.support.world import World

BAD, BUSY = LLMStatusCode.LLM_PARAM_INVALID, LLMStatusCode.LLM_LINK_BUSY
NOT_YET = LLMStatusCode.LLM_NOT_YET_LINK


# ---- L1 --------------------------------------------------------------------------------------------------


DEVICES = {"text": ("4", "7", False), "int": (4, 7, False), "same": ("0", "0", True)}
EACH_ONCE = [
    pytest.param(combo, devices, id=f"{combo}-{name}")
    for name, devices in DEVICES.items()
    for combo in [Combo("A", "tcp"), Combo("B", "local")]
]


@pytest.mark.rule("4.60", "4.64", "4.67")
@pytest.mark.parametrize(("combo", "devices"), EACH_ONCE)
def test_l1_device_numbers_decide_nothing_but_the_default_port(
    spawn: Spawner, combo: Combo, devices: tuple[Any, Any, bool]
) -> None:
    first, second, with_ports = devices
    env: dict[str, str | None] = {"ASCEND_RT_VISIBLE_DEVICES": "4,7"}
    if not with_ports:
        base, _ = free_ports(20)[::19]
        env["HCCL_IF_BASE_PORT"] = str(base)
    pair = Pair(spawn(env=env), spawn(env=env), combo)
    for peer, cluster_id in ((pair.p, P_ID), (pair.d, D_ID)):
        values = {**actors.options(combo.mode, combo.backend), "ge.exec.deviceId": "0"}
        peer.call(actors.up, cluster_id, values)
    pair.source()
    pair.destination()
    ports = [{"listen_port": port} for port in free_ports(2)] if with_ports else [{}, {}]
    table = rank_table(
        server(device(first, "0", **ports[0]), device(second, "1", **ports[1]), server_id="127.0.0.1")
    )
    assert link_both(pair, table) == (1, 1)
    pair.pull_blocks([1], [2]).ok()
    pair.blocks_right([1], [2])
    if not with_ports:
        assert pair.p.call(listen_address) == ("127.0.0.1", base + 4)


# ---- L2 --------------------------------------------------------------------------------------------------


@pytest.mark.rule("4.49", "4.51")
@pytest.mark.parametrize("seconds", [1.0, pytest.param(4.0, marks=pytest.mark.slow)])
@TWO
def test_l2_one_side_is_late(spawn: Spawner, combo: Combo, seconds: float) -> None:
    pair = make_pair(spawn, combo)
    values = actors.options(combo.mode, combo.backend, LinkTotalTime="10")
    table = on_loopback(*free_ports(2))
    pair.d.call(actors.up, D_ID, values)
    watch = Stopwatch()
    mine = pair.d.call(comm, table)
    starting = pair.p.start(late_start, watch.began + seconds, values, table)
    assert pair.d.call(status, mine) is PREPARING
    theirs = starting.result()
    for peer, comm_id in ((pair.d, mine), (pair.p, theirs)):
        end, at = peer.call(settled, comm_id, 3.0)
        assert end == OK and watch.within(seconds + 2.0, until=at)


@pytest.mark.rule("3.48", "4.49", "4.51", "4.53", "4.66")
@pytest.mark.parametrize("side", ["dials", "waits"])
def test_l2_nobody_comes(spawn: Spawner, side: str) -> None:
    peer = spawn()
    table = on_loopback(*free_ports(2))
    own, other = (D_ID, P_ID) if side == "dials" else (P_ID, D_ID)
    peer.call(actors.up, own, actors.options(LinkTotalTime="2"))
    peer.call(actors.watch_logs)
    before = peer.call(actors.resources)
    watch = Stopwatch()
    comm_id = peer.call(comm, table)
    assert peer.call(status, comm_id) is PREPARING
    end, at = peer.call(settled, comm_id, 4.0)
    assert end is FAILED
    assert watch.about(2.0, until=at)
    assert peer.call(status, comm_id) is FAILED
    records = peer.call(actors.log_records, "WARNING")
    assert len(records) == 1 and f"cluster {other}" in records[0][2], records
    assert f"cluster {other}" in peer.call(link_error, other)
    assert peer.call(listen_address) is None
    peer.call(leave, comm_id)
    assert peer.call(actors.resources) == before
    for again in (leave, status):
        peer.attempt(again, comm_id).expect(NOT_YET, f"no comm {comm_id}")


@pytest.mark.rule("4.50", "4.52")
def test_unlink_while_preparing_ends_everything_at_once(spawn: Spawner) -> None:
    peer = spawn()
    peer.call(actors.up, D_ID, actors.options(LinkTotalTime="60"))
    before = peer.call(actors.resources)
    comm_id = peer.call(comm, on_loopback(*free_ports(2)))
    outcome = peer.attempt(leave, comm_id)
    outcome.ok()
    assert outcome.took.within(AT_ONCE)
    assert peer.call(actors.resources) == before
    assert peer.call(comm, on_loopback(*free_ports(2))) == 2, "ids are never used again"


def test_finalize_while_preparing(spawn: Spawner) -> None:
    peer = spawn()
    values = actors.options(LinkTotalTime="60")
    peer.call(actors.up, P_ID, values)
    assert peer.call(comm, on_loopback(*free_ports(2))) == 1
    outcome = peer.attempt(actors.finalize)
    outcome.ok()
    assert outcome.took.within(2.0)
    peer.call(actors.up, P_ID, values)
    assert peer.call(comm, on_loopback(*free_ports(2))) == 1, "a new life counts anew"


# ---- L3 --------------------------------------------------------------------------------------------------


def _bad_tables() -> dict[str, str]:
    good = json.loads(on_loopback(20011, 20012))

    def changed(change: Any) -> str:
        table = json.loads(json.dumps(good))
        change(table, table["server_list"][0]["device"])
        return json.dumps(table)

    two = [
        server(device(0, 0, device_ip="127.0.0.1"), server_id="a"),
        server(device(1, 1), server_id="b"),
    ]
    return {
        "server_list": changed(lambda table, _: table.pop("server_list")),
        "server_list[0].device": changed(lambda _, devices: devices.clear()),
        "server_list[0].device[1].rank_id is missing": changed(lambda _, d: d[1].pop("rank_id")),
        "server_list[0].device[1].rank_id is 'x'": changed(lambda _, d: d[1].update(rank_id="x")),
        "server_list[].device[].rank_id is 1": changed(lambda _, d: d.pop()),
        "server_list[1].device[0].device_ip": rank_table(*two),
        "server_list[].device[].rank_id": "not JSON",
    }


@pytest.mark.rule("4.59", "4.61")
def test_l3_incomplete_rank_tables(spawn: Spawner) -> None:
    pair = make_pair(spawn, Combo("A", "auto"))
    up_both(pair)
    before = pair.d.call(actors.resources)
    for path, table in _bad_tables().items():
        outcome = pair.d.attempt(comm, table)
        outcome.expect(BAD, path)
        assert outcome.took.within(0.1)
    assert pair.d.call(actors.resources) == before
    assert link_both(pair, on_loopback(*free_ports(2))) == (1, 1)


# ---- addresses -------------------------------------------------------------------------------------------


@pytest.mark.rule("4.62", "4.63")
def test_section_4_candidates_are_tried_in_order_until_one_answers(spawn: Spawner) -> None:
    """device_ip and host_ip of the lower rank lead nowhere; server_id does."""
    pair = make_pair(spawn, Combo("B", "auto"))
    up_both(pair)
    first, second = free_ports(2)
    table = rank_table(
        server(
            device(0, 0, device_ip="192.0.2.1", listen_port=first),
            device(1, 1, listen_port=second),
            server_id="127.0.0.1",
            host_ip="127.0.0.77",
        )
    )
    # The owner listens on 127.0.0.77 as well, all of 127/8 being local: so it takes that.
    ids = [peer.call(comm, table) for peer in (pair.p, pair.d)]
    for peer, comm_id in zip((pair.p, pair.d), ids, strict=True):
        assert peer.call(settled, comm_id, 4.0)[0] is OK
    (found,) = pair.d.call(_addresses)
    assert found == f"127.0.0.77:{first}"


def _addresses(w: World) -> list[str]:
    return [link.address for link in w.dist.links()]


@pytest.mark.rule("4.63")
def test_section_4_no_local_address_to_be_dialled_at(spawn: Spawner) -> None:
    peer = spawn()
    peer.call(actors.up, P_ID, actors.options())
    table = rank_table(*(server(device(0, r), server_id=f"192.0.2.{r + 1}") for r in (0, 1)))
    outcome = peer.attempt(comm, table)
    outcome.expect(BAD, "server_list[0].device[0]", "192.0.2.1", "[2]")
    assert outcome.took.within(0.1)


@pytest.mark.rule("4.50")
def test_section_4_a_port_of_another_process(spawn: Spawner) -> None:
    holder, peer = spawn(), spawn()
    _, port = holder.call(actors.up, 9, actors.options(listen="127.0.0.1:0"))
    (other,) = free_ports(1)
    peer.call(actors.up, P_ID, actors.options())
    outcome = peer.attempt(comm, on_loopback(port, other))
    outcome.expect(LLMStatusCode.LLM_FAILED, f"127.0.0.1:{port}", "in use")
    assert peer.call(comm, on_loopback(other, port)) == 1, "a refused call takes no number"


@pytest.mark.rule("4.69")
def test_section_4_one_listener_serves_comms_and_link_clusters(spawn: Spawner) -> None:
    """The port of the rank table is the one that the options listen on."""
    pair = make_pair(spawn, Combo("B", "auto"))
    first, second = free_ports(2)
    pair.p.call(actors.up, P_ID, actors.options("B", listen=f"0.0.0.0:{first}"))
    pair.d.call(actors.up, D_ID, actors.options("B"))
    ids = link_both(pair, on_loopback(first, second))
    assert pair.p.call(listen_address) == ("0.0.0.0", first)
    assert pair.d.call(listen_address) == ("127.0.0.1", second)
    pair.p.call(leave, ids[0])
    assert pair.p.call(listen_address) == ("0.0.0.0", first)
    assert pair.d.call(actors.link, [(P_ID, ("127.0.0.1", first))]) == (SUCCESS, [SUCCESS])


def test_mode_mismatch_fails_at_once(spawn: Spawner) -> None:
    p, d = spawn(), spawn()
    p.call(actors.up, P_ID, actors.options("A", LinkTotalTime="20"))
    d.call(actors.up, D_ID, actors.options("B", LinkTotalTime="20"))
    table = on_loopback(*free_ports(2))
    p.call(comm, table)
    comm_id = d.call(comm, table)
    assert d.call(settled, comm_id, 2.0)[0] is FAILED
    assert "enable_remote_cache_accessible" in d.call(link_error, P_ID)
