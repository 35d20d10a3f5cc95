"""Rows G3 and G14, continued: caches, what needs threads of its own, other addresses, comms."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import llm_datadist as dd
from llm_datadist import BlocksCacheKey, RegisterMemStatus
from llm_datadist.transports import tcp_channel
from tests.support import actors, leaks
from tests.support.engines import Engines
from tests.support.rank_tables import free_ports, on_loopback
from tests.support.short_pair import (
    FAILED,
    OUT,
    SUCCESS,
    ShortPair,
    attempt,
    judge,
    once_and_lasting,
)
from tests.support.shortage import shortages
from tests.support.world import wait_until

# ---- caches --------------------------------------------------------------------------------------------------------


@once_and_lasting
def test_g14_caches_without_descriptors(short_pairs: Callable[..., ShortPair], lasting: bool) -> None:
    pair = short_pairs("B", "shm")
    assert pair.up() == SUCCESS
    manager = pair.a.cache_manager
    source = pair.caches[1][0]
    desc = dd.CacheDesc(1, [2, 64], dd.DataType.DT_UINT8, dd.Placement.HOST)

    def work() -> None:
        cache = manager.register_blocks_cache(source.cache_desc, source.tensor_addrs, None)
        manager.unregister_cache(cache.cache_id)
        manager.deallocate_cache(manager.allocate_cache(desc))

    work()
    known = len(manager.caches())
    for shortage in shortages(lasting=lasting):
        with shortage:
            judge(attempt(work), shortage, OUT)
        assert len(manager.caches()) == known
        work()


# ---- what needs threads of its own ---------------------------------------------------------------------------------


@once_and_lasting
def test_g3_many_links_are_left_without_threads(hurried: None, lasting: bool) -> None:
    with Engines("B", "local") as engines:
        center, *others = (engines.make(cluster_id) for cluster_id in range(1, 5))
        ids = [engine.cluster_id for engine in others]
        clusters = [actors.cluster(i) for i in ids]
        for shortage in shortages(lasting=lasting):
            for engine in others:
                assert engines.link(center, engine.cluster_id, engine) == SUCCESS
            before = leaks.take()
            with shortage:
                assert center.unlink_clusters(clusters, 2000) == (SUCCESS, [SUCCESS] * 3)
            assert not center.links()
            assert not leaks.differences(before)
        assert "thread" in shortage.asked


@once_and_lasting
def test_g3_a_drain_that_gets_no_thread_has_changed_nothing(
    short_pairs: Callable[..., ShortPair], lasting: bool
) -> None:
    pair = short_pairs("B", "local")
    assert pair.up() == SUCCESS
    for shortage in shortages(lasting=lasting):
        with shortage:
            error = attempt(pair.a.drain, 500)
        judge(error, shortage, OUT)
        if error is not None:
            pair.pull(pair.a, pair.b)
            assert pair.arrived(pair.a)
    pair.a.drain(500)


@once_and_lasting
def test_g3_a_wide_read_gets_along_without_threads(
    short_pairs: Callable[..., ShortPair], lasting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stripes over tcp, movers by address."""
    monkeypatch.setattr(tcp_channel, "STRIPE_NBYTES", 1 << 20)
    for backend in ("tcp", "local"):
        for shortage in shortages(lasting=lasting):
            pair = short_pairs("B", backend)
            pair.a._engine._transports.stream._stripes = 3  # type: ignore[union-attr]
            assert pair.up() == SUCCESS
            source = np.full((1, 2, 8 << 20), 3, np.uint8)
            destination = np.full((1, 2, 8 << 20), 0xA5, np.uint8)
            pair.register(pair.b, source, 5)
            cache = pair.register(pair.a, destination, 6)
            pull = pair.a.cache_manager.pull_blocks
            with shortage:
                error = attempt(pull, BlocksCacheKey(2, 5), cache, [0, 1], [0, 1])
            if set(shortage.refused) <= {"thread"} and "serves" not in str(error):
                assert error is None and (destination == 3).all(), shortage.refused
            destination[:] = 0xA5
            assert backend == "local" or shortage.asked.count("thread") == 2
            pull(BlocksCacheKey(2, 5), cache, [0, 1], [0, 1])
            assert (destination == 3).all()


# ---- another address, comms ---------------------------------------------------------------------------------------


@once_and_lasting
@pytest.mark.parametrize("same_port", [False, True])
def test_g14_another_address_without_descriptors(hurried: None, lasting: bool, same_port: bool) -> None:
    """It listens where it is told, or where it did; if there is nothing for that either, nowhere, and says so."""
    with Engines("B", "local") as engines:
        engine = engines.make(1)
        _, port = engine.listen_address  # type: ignore[misc]
        old, new = ("127.0.0.1", port), ("127.0.0.2", port if same_port else 0)
        for shortage in shortages(lasting=lasting):
            engine.switch_role(dd.LLMRole.MIX, place(old))
            before = leaks.take()
            with shortage:
                error = attempt(engine.switch_role, dd.LLMRole.MIX, place(new))
            judge(error, shortage, OUT, FAILED)
            now = engine.listen_address
            assert now is None or answers(now), shortage.refused
            if error is None:
                assert now is not None and now[0] == new[0]
            else:
                assert now in (old, None) if lasting and same_port else now == old
                assert not leaks.differences(before)
            engine.switch_role(dd.LLMRole.MIX, place(new))
            assert answers(engine.listen_address)


def place(address: tuple[str, int]) -> dict[str, str]:
    return {"llm.listenIpInfo": f"{address[0]}:{address[1]}"}


def answers(address: Any) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(address, 1.0):
        return True
    return False


@once_and_lasting
def test_g14_a_comm_with_either_side_short(hurried: None, lasting: bool) -> None:
    """It fails at once, or is ready as soon as there is something again."""
    ports = free_ports(2)
    table, ranks = on_loopback(*ports), {1: 0, 2: 1}
    with Engines("B", "local") as engines:
        both = engines.make(1), engines.make(2)
        comms: list[tuple[dd.LLMDataDist, int]] = []

        def begin() -> None:
            for engine in both:
                comms.append((engine, engine.link("c", ranks, table)))

        def ready() -> bool:
            return all(engine.query_register_mem_status(i) is RegisterMemStatus.OK for engine, i in comms)

        for shortage in shortages(lasting=lasting):
            before = leaks.take()
            with shortage:
                error = attempt(begin)
                if error is None:
                    wait_until(ready, 0.15)
            judge(error, shortage, OUT, FAILED)
            if error is None:
                assert wait_until(ready, 5.0), shortage.refused
            while comms:
                engine, comm_id = comms.pop()
                engine.unlink(comm_id)
            assert not any(engine.links() for engine in both)
            assert not leaks.differences(before), shortage.refused
