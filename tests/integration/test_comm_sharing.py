"""Comms of several clusters, who holds a link, and registration after link() (contract section 4)."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import llm_datadist as dd
from llm_datadist import LLMStatusCode, RegisterMemStatus
from llm_datadist.testing.stopwatch import Stopwatch
from tests.support import actors
from tests.support.comms import (
    OK,
    PREPARING,
    comm,
    ids_linked,
    leave,
    link_both,
    settled,
    status,
    up_both,
)
from tests.support.pair import D_ID, P_ID, SUCCESS, Combo, Pair, make_pair
from tests.support.pool import Spawner
from tests.support.rank_tables import free_ports, on_loopback
from tests.support.world import World, wait_until

BAD, BUSY = LLMStatusCode.LLM_PARAM_INVALID, LLMStatusCode.LLM_LINK_BUSY
NOT_YET = LLMStatusCode.LLM_NOT_YET_LINK


# ---- several clusters, sharing ---------------------------------------------------------------------------


@pytest.mark.rule("4.55")
def test_section_4_four_clusters_link_in_all_pairs(spawn: Spawner) -> None:
    peers = [spawn() for _ in range(4)]
    ids = [2**63 + n for n in range(4)]
    table = on_loopback(*free_ports(4))
    ranks = dict(zip(ids, range(4), strict=True))
    for peer, cluster_id in zip(peers, ids, strict=True):
        peer.call(actors.up, cluster_id, actors.options("B", LinkTotalTime="5"))
    comms = [peer.call(comm, table, ranks) for peer in peers[:3]]
    assert [peer.call(status, c) for peer, c in zip(peers, comms, strict=False)] == [PREPARING] * 3
    comms.append(peers[3].call(comm, table, ranks))
    for at, (peer, comm_id) in enumerate(zip(peers, comms, strict=True)):
        assert peer.call(settled, comm_id, 3.0)[0] is OK
        assert ids_linked(peer) == [i for i in ids if i != ids[at]]
    peers[1].call(leave, comms[1])
    assert ids_linked(peers[1]) == []
    for peer, comm_id in ((peers[0], comms[0]), (peers[3], comms[3])):
        assert wait_until(lambda peer=peer: ids[1] not in ids_linked(peer))
        assert len(ids_linked(peer)) == 2
        assert peer.call(status, comm_id) is OK


@pytest.mark.rule("4.50", "4.52", "4.70", "4.71")
def test_section_4_comms_to_one_cluster_share_one_link(spawn: Spawner) -> None:
    pair = make_pair(spawn, Combo("B", "auto"))
    up_both(pair)
    table = on_loopback(*free_ports(2))
    first, second = link_both(pair, table), link_both(pair, table)
    assert (first, second) == ((1, 1), (2, 2))
    assert ids_linked(pair.p) == [D_ID] and ids_linked(pair.d) == [P_ID]
    for peer in (pair.p, pair.d):
        peer.call(leave, 1)
        assert ids_linked(pair.p) == [D_ID] and ids_linked(pair.d) == [P_ID]
    pair.p.call(leave, 2)
    assert ids_linked(pair.p) == []
    assert wait_until(lambda: ids_linked(pair.d) == [])
    pair.d.call(leave, 2)


@pytest.mark.rule("4.70")
@pytest.mark.parametrize("force", [False, True])
def test_section_4_link_clusters_and_a_comm_share_one_link(spawn: Spawner, force: bool) -> None:
    pair = make_pair(spawn, Combo("B", "auto"))
    up_both(pair)
    ports = free_ports(2)
    link_both(pair, on_loopback(*ports))
    got = pair.d.call(actors.link, [(P_ID, ("127.0.0.1", ports[0]))])
    assert got == (LLMStatusCode.LLM_ALREADY_LINK, [LLMStatusCode.LLM_ALREADY_LINK])
    assert pair.d.call(actors.unlink, [P_ID], 3000, force) == (SUCCESS, [SUCCESS])
    assert ids_linked(pair.d) == [P_ID], "the comm holds it"
    pair.d.call(leave, 1)
    assert ids_linked(pair.d) == []
    assert wait_until(lambda: ids_linked(pair.p) == [])


@pytest.mark.parametrize("both_linked", [False, True])
def test_section_4_unlink_clusters_counts_for_both_sides_of_a_link_that_a_comm_holds(
    spawn: Spawner, both_linked: bool
) -> None:
    pair = make_pair(spawn, Combo("B", "auto"))
    up_both(pair)
    ports = free_ports(2)
    link_both(pair, on_loopback(*ports))
    pair.d.call(actors.link, [(P_ID, ("127.0.0.1", ports[0]))])
    if both_linked:
        pair.p.call(actors.link, [(D_ID, ("127.0.0.1", ports[1]))])
    assert pair.p.call(actors.unlink, [D_ID]) == (SUCCESS, [SUCCESS])
    pair.d.call(actors.check_link, P_ID)
    pair.p.call(leave, 1)
    pair.d.call(leave, 1)
    assert wait_until(lambda: ids_linked(pair.d) == [] and ids_linked(pair.p) == [])


@pytest.mark.rule("4.71")
@pytest.mark.parametrize("leaves_first", ["p", "d"])
def test_section_4_a_link_goes_with_the_last_of_comm_and_link_clusters(
    spawn: Spawner, leaves_first: str
) -> None:
    pair = make_pair(spawn, Combo("B", "auto"))
    up_both(pair)
    ports = free_ports(2)
    link_both(pair, on_loopback(*ports))
    pair.d.call(actors.link, [(P_ID, ("127.0.0.1", ports[0]))])
    for peer in (pair.p, pair.d) if leaves_first == "p" else (pair.d, pair.p):
        peer.call(leave, 1)
        assert ids_linked(pair.p) == [D_ID] and ids_linked(pair.d) == [P_ID]
    pair.d.call(actors.check_link, P_ID)
    assert pair.d.call(actors.unlink, [P_ID]) == (SUCCESS, [SUCCESS])
    assert ids_linked(pair.d) == []
    assert wait_until(lambda: ids_linked(pair.p) == [])


def test_unlink_waits_for_transfers_and_stays_when_they_do_not_end(spawn: Spawner) -> None:
    """A layer-wise push is held in its synchronizer for longer than unlink waits."""
    pair = make_pair(spawn, Combo("B", "auto"))
    up_both(pair)
    table = on_loopback(*free_ports(2))
    pair.destination()
    pair.p.call(actors.blocks_cache, "out", seed=3)
    pair.d.call(actors.blocks_cache, "in", model_id=5)
    link_both(pair, table)
    pair.p.call(_start_held_push, D_ID)
    outcome = pair.p.attempt(leave, 1)
    outcome.expect(BUSY, "comm 1", f"[{D_ID}]")
    assert outcome.took.about(3.0)
    assert pair.p.call(status, 1) is OK
    assert ids_linked(pair.p) == [D_ID]
    assert pair.p.call(_end_held_push) == SUCCESS
    pair.p.call(leave, 1)
    assert ids_linked(pair.p) == []


class _Gate(dd.LayerSynchronizer):
    def __init__(self) -> None:
        self.open = threading.Event()

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None = None) -> bool:
        return self.open.wait(30)


def _start_held_push(w: World, cluster_id: int) -> None:
    gate = _Gate()
    config = dd.TransferWithCacheKeyConfig(dd.BlocksCacheKey(cluster_id, 5), range(0, 1), range(0, 1))
    cache = w.held["out"].cache
    w.extras["gate"] = gate
    w.extras["task"] = w.dist.cache_manager.transfer_cache_async(cache, gate, [config], [0], [1])


def _end_held_push(w: World) -> Any:
    w.extras.pop("gate").open.set()
    return w.extras.pop("task").synchronize(5000)


def test_a_link_that_went_down_while_others_were_awaited_is_made_again(spawn: Spawner) -> None:
    """Cluster 1 is linked, then killed and started again before cluster 2 comes."""
    first, dialler, third = spawn(), spawn(), spawn()
    ports = free_ports(3)
    ranks = {1: 0, 2: 1, 3: 2}
    table = on_loopback(*ports)
    values = actors.options(LinkTotalTime="20")
    first.call(actors.up, 1, values)
    dialler.call(actors.up, 3, values)
    first.call(comm, table, ranks)
    comm_id = dialler.call(comm, table, ranks)
    assert wait_until(lambda: ids_linked(dialler) == [1])
    again = spawn()
    first.kill()
    assert wait_until(lambda: ids_linked(dialler) == [])
    again.call(actors.up, 1, values)
    again.call(comm, table, ranks)
    assert wait_until(lambda: ids_linked(dialler) == [1])
    assert dialler.call(status, comm_id) is PREPARING
    third.call(actors.up, 2, values)
    third.call(comm, table, ranks)
    assert dialler.call(settled, comm_id, 3.0)[0] is OK
    assert ids_linked(dialler) == [1, 2]


# ---- registration after link -----------------------------------------------------------------------------


@pytest.mark.rule("4.72")
@pytest.mark.parametrize("mode", ["A", "B"])
def test_section_4_after_link_caches_are_not_open_to_peers(spawn: Spawner, mode: str) -> None:
    pair = make_pair(spawn, Combo(mode, "auto"))
    up_both(pair)
    assert pair.p.call(_accessible, "before", None) is True
    link_both(pair, on_loopback(*free_ports(2)))
    assert pair.p.call(_accessible, "after", None) is False
    pair.p.attempt(_accessible, "bad", True).expect(BAD, "remote_accessible is True", "link()")
    assert pair.p.call(_accessible, "no", False) is False
    assert pair.p.call(_accessible, "before", False) is False
    pair.p.call(leave, 1)
    assert pair.p.call(_accessible, "again", None) is True


@pytest.mark.rule("4.73")
def test_section_4_link_clusters_changes_nothing_about_registration(pair: Pair) -> None:
    pair.up()
    assert pair.d.call(_accessible, "x", None) is True
    assert pair.d.call(_accessible, "y", True) is True


def _accessible(w: World, name: str, asked: bool | None) -> bool:
    cache_id = actors.blocks_cache(w, name, accessible=asked)
    (info,) = [c for c in w.dist.cache_manager.caches() if c.cache_id == cache_id]
    return bool(info.remote_accessible)


# ---- many ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "decoders"),
    [(4, 4), pytest.param(16, 16, marks=[pytest.mark.slow, pytest.mark.timeout(300)])],
)
def test_issue_all_pairs_on_one_host(spawn: Spawner, prompts: int, decoders: int) -> None:
    """Every prompt with every decoder by a comm of its own, all calls at the same time."""
    count = prompts + decoders
    peers = [spawn() for _ in range(count)]
    ports = free_ports(count)
    table = on_loopback(*ports)
    for at, peer in enumerate(peers):
        peer.call(actors.up, at, actors.options("B", LinkTotalTime="30"))
    pairs = {
        at: [(p, d) for p in range(prompts) for d in range(prompts, count) if at in (p, d)]
        for at in range(count)
    }
    watch = Stopwatch()
    running = [peer.start(_comms, table, pairs[at]) for at, peer in enumerate(peers)]
    ends = [r.result() for r in running]
    assert all(end is OK for each in ends for end in each)
    assert watch.within(20.0)
    for at, peer in enumerate(peers):
        others = range(prompts, count) if at < prompts else range(prompts)
        assert ids_linked(peer) == list(others)
    pair = Pair(peers[0], peers[-1], Combo("B", "auto"))
    pair.p.call(actors.blocks_cache, "src", seed=5, model_id=0, accessible=False)
    pair.d.call(actors.blocks_cache, "dst")
    pair.pull_blocks([1], [2], dd.BlocksCacheKey(0, 0)).expect(BAD, "remote_accessible")


def _comms(w: World, table: str, pairs: list[tuple[int, int]]) -> list[RegisterMemStatus]:
    ids = [comm(w, table, {p: p, d: d}, f"{p}-{d}") for p, d in pairs]
    return [settled(w, comm_id, 20.0)[0] for comm_id in ids]
