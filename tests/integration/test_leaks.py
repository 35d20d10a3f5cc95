"""Row R1: nothing is lost per call. (Rows R2 and R3 come with the pools.)"""

from __future__ import annotations

import gc

import numpy as np
import pytest

import llm_datadist as dd
from llm_datadist import LLMException
from tests.support import actors
from tests.support.pair import P_ID, SUCCESS, Pair, of_model
from tests.support.peers import Peer
from tests.support.pool import Spawner
from tests.support.sockets import refusing_address
from tests.support.which_combos import THREE
from tests.support.world import World, wait_until

ROUNDS = {"short": (60, 600, 20, 30, 5), "long": (2000, 20_000, 500, 500, 100)}
MAX_GROWTH = 4 << 20


@THREE
@pytest.mark.parametrize(
    "length", ["short", pytest.param("long", marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
def test_r1_nothing_is_lost_per_call(pair: Pair, length: str) -> None:
    pair.up(link=False)
    pair.source()
    pair.destination()
    nowhere = refusing_address()
    for peer in (pair.p, pair.d):
        peer.call(_cycles, 50)
    pair.d.call(_work, pair.address, nowhere, (50, 50, 10, 50))
    before = {peer: (peer.call(actors.resources), peer.call(actors.rss_nbytes)) for peer in (pair.p, pair.d)}
    *work, cycles = ROUNDS[length]
    pair.d.call(_work, pair.address, nowhere, tuple(work), timeout=500)
    for peer, (resources, nbytes) in before.items():
        # Fewer is no loss: at the first look a worker may have been about to end, a socket about to be closed.
        assert wait_until(lambda p=peer, r=resources: _no_more(p, r)), (  # type: ignore[misc]
            peer.call(actors.resources),
            resources,
        )
        assert peer.call(actors.rss_nbytes) - nbytes <= MAX_GROWTH
    for peer, (resources, _) in before.items():
        nbytes = peer.call(actors.rss_nbytes)
        peer.call(_cycles, cycles, timeout=500)
        assert _no_more(peer, resources)
        assert peer.call(actors.rss_nbytes) - nbytes <= MAX_GROWTH


def _no_more(peer: Peer, before: tuple[int, ...]) -> bool:
    return all(now <= then for now, then in zip(peer.call(actors.resources), before, strict=True))


def _work(w: World, address: tuple[str, int], nowhere: tuple[str, int], rounds: tuple[int, ...]) -> None:
    links, pulls, refused_links, refused_pulls = rounds
    for _ in range(links):
        assert actors.link(w, [(P_ID, address)])[0] == SUCCESS
        assert actors.unlink(w, [P_ID])[0] == SUCCESS
    assert actors.link(w, [(P_ID, address)])[0] == SUCCESS
    for at in range(pulls):
        actors.pull_blocks(w, of_model(0), "dst", [at % 8], [3])
    for _ in range(refused_links):
        assert actors.link(w, [(99, nowhere)])[0] != SUCCESS
    refusals = 0
    for _ in range(refused_pulls):
        try:
            actors.pull_blocks(w, of_model(5), "dst", [0], [0])
        except LLMException:
            refusals += 1
    assert refusals == refused_pulls
    assert actors.unlink(w, [P_ID])[0] == SUCCESS


@pytest.mark.parametrize(("used", "nbytes"), [(False, 50 << 10), (True, 100 << 10)], ids=["new", "used"])
def test_finalized_engines_are_small_until_they_are_collected(
    spawn: Spawner, used: bool, nbytes: int
) -> None:
    """They refer to themselves, so they stay until Python looks for cycles of old objects, which may take long."""
    assert spawn().call(_uncollected, 40, used) <= 40 * nbytes


def _uncollected(w: World, rounds: int, used: bool) -> int:
    turn = _pull_once if used else _cycles
    turn(w, 20)
    gc.collect()
    gc.disable()
    before = actors.rss_nbytes(w)
    turn(w, rounds)
    growth = actors.rss_nbytes(w) - before
    gc.enable()
    return growth


def _pull_once(w: World, rounds: int) -> None:
    """Two engines, and a block from one to the other over tcp."""
    desc, memory = dd.CacheDesc(1, [4, 64], dd.DataType.DT_INT8), np.arange(512, dtype=np.uint8)
    for _ in range(rounds):
        owner, reader = (dd.LLMDataDist(dd.LLMRole.MIX, i) for i in (P_ID, 70))
        owner.init(actors.options("B", "tcp", "127.0.0.1:0", AllowMultipleInstances="1"))
        reader.init(actors.options("B", "tcp", AllowMultipleInstances="1"))
        at = int(memory.ctypes.data)
        owner.cache_manager.register_blocks_cache(desc, [at], dd.BlocksCacheKey(P_ID))
        cache = reader.cache_manager.register_blocks_cache(desc, [at + 256])
        assert reader.link_clusters([actors.cluster(P_ID, owner.listen_address)], 3000)[0] == SUCCESS
        reader.cache_manager.pull_blocks(dd.BlocksCacheKey(P_ID), cache, [1], [2])
        reader.finalize()
        owner.finalize()


def _cycles(w: World, rounds: int) -> None:
    """init and finalize of an engine beside the one of the test."""
    for _ in range(rounds):
        dist = dd.LLMDataDist(dd.LLMRole.MIX, 70)
        dist.init(actors.options(listen="127.0.0.1:0", AllowMultipleInstances="1"))
        dist.finalize()
