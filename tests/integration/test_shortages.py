"""Rows G3, G8 and G14: the system refuses something for a moment, at each place of each operation.

Nothing is left behind, nothing says that it is there while it is not, and the same works as soon as there is
something again. The process is the test's own: what it asks for is counted, and the k-th thing is refused.
"""

from __future__ import annotations

import contextlib
import gc
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import llm_datadist as dd
from llm_datadist import BlocksCacheKey, LLMException, LLMStatusCode, RegisterMemStatus, _accepting
from llm_datadist._engine import workers
from llm_datadist.transports import tcp_channel, tcp_pool
from tests.support import actors, leaks
from tests.support.engines import Engines
from tests.support.rank_tables import free_ports, on_loopback
from tests.support.shortage import LIMITS, Shortage, shortages
from tests.support.world import wait_until

SUCCESS = LLMStatusCode.LLM_SUCCESS
OUT, FAILED = LLMStatusCode.LLM_OUT_OF_MEMORY, LLMStatusCode.LLM_FAILED
LINK_FAILED, LATE = LLMStatusCode.LLM_LINK_FAILED, LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT
BACKENDS = ["auto", "shm", "local", "tcp"]

once_and_lasting = pytest.mark.parametrize("lasting", [False, True], ids=["once", "lasting"])


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_accepting, "PATIENCE_S", 0.04)
    monkeypatch.setattr(_accepting, "PAUSE_S", 0.02)
    monkeypatch.setattr(tcp_pool, "_ASK_AGAIN_S", 0.05)
    monkeypatch.setattr(workers, "_IDLE_S", 0.02)


def attempt(call: Callable[..., Any], *args: Any) -> Exception | None:
    try:
        call(*args)
    except Exception as error:
        return error
    return None


@contextlib.contextmanager
def little_time(engine: dd.LLMDataDist) -> Iterator[None]:
    """For transfers that wait in vain meanwhile."""
    state = engine._engine._state  # type: ignore[union-attr]
    whole = state.options
    state.options = replace(whole, sync_kv_timeout_ms=200)
    yield
    state.options = whole


def judge(error: Exception | None, shortage: Shortage, *codes: LLMStatusCode) -> None:
    """It went well all the same, or says what was short."""
    if error is None:
        return
    assert shortage.refused, f"nothing was refused: {error!r}"
    assert isinstance(error, LLMException), f"{shortage.refused}: {error!r}"
    assert error.status_code in codes, f"{shortage.refused}: {error!r}"
    assert re.search(LIMITS, str(error)), f"{shortage.refused}: {error}"


def memfds(most: int | None = None) -> int:
    """Areas that are mapped; those of cyclic garbage do not count, if there are more than ``most``."""
    count = Path("/proc/self/maps").read_text().count("memfd:llm-datadist")
    if most is not None and count > most:
        gc.collect()
        return memfds()
    return count


# ---- init and finalize ------------------------------------------------------------------------------------------


@once_and_lasting
@pytest.mark.parametrize("backend", BACKENDS)
def test_g3_g14_init_without_threads_or_descriptors_leaves_nothing(backend: str, lasting: bool) -> None:
    values = actors.options("B", backend, "127.0.0.1:0", AllowMultipleInstances="1")
    engine = dd.LLMDataDist(dd.LLMRole.MIX, 1)
    engine.init(values)
    transports = set(engine._engine._transports.opened)  # type: ignore[union-attr]
    engine.finalize()
    kinds = set()
    for shortage in shortages(lasting=lasting):
        before, mapped = leaks.take(), memfds()
        with shortage:
            error = attempt(engine.init, values)
        judge(error, shortage, OUT, FAILED)
        kinds |= set(shortage.refused)
        if error is not None:
            assert memfds(mapped) <= mapped
            assert not leaks.differences(before), shortage.refused
            with pytest.raises(RuntimeError, match=r"not initialised|is finalized"):
                _ = engine.cache_manager
            engine.init(values)
        assert set(engine._engine._transports.opened) == transports  # type: ignore[union-attr]
        with Shortage(1, lasting=True):
            engine.finalize()
        assert not leaks.differences(before), shortage.refused
    assert {"thread", "socket", "epoll", "eventfd", "watch", "FileIO"} <= kinds


# ---- links and transfers -----------------------------------------------------------------------------------------


@pytest.fixture
def make() -> Iterator[Callable[..., Pair]]:
    pairs: list[Pair] = []

    def made(mode: str, backend: str, *, serving: bool = True) -> Pair:
        while pairs:
            pairs.pop().__exit__(None, None, None)
        pairs.append(Pair(mode, backend))
        return pairs[-1].begin(serving)

    yield made
    while pairs:
        pairs.pop().__exit__(None, None, None)


class Pair(Engines):
    """Two engines of this process: ``a`` dials ``b``; each has a source and a destination."""

    def begin(self, serving: bool) -> Pair:
        """``serving``: the threads that answer reads over tcp run already; they stay as long as the engine."""
        self.a, self.b = self.make(1), self.make(2)
        self.caches = {}
        for engine in (self.a, self.b):
            if serving:
                engine._engine._transports.stream._server._post(lambda: None)  # type: ignore[union-attr]
            source, self.sources = self.blocks(engine, 7, 0)
            self.caches[engine.cluster_id] = source, *self.blocks(engine, 0xA5, 1)
        return self

    def up(self) -> LLMStatusCode:
        return self.link(self.a, 2, self.b)

    def down(self) -> None:
        self.a.unlink_clusters([actors.cluster(2)], 2000, True)
        assert not self.a.links()

    def pull(self, reader: dd.LLMDataDist, owner: dd.LLMDataDist) -> None:
        cache = self.caches[reader.cluster_id][1]
        reader.cache_manager.pull_blocks(BlocksCacheKey(owner.cluster_id, 0), cache, [1, 2], [2, 3])

    def push(self, sender: dd.LLMDataDist, receiver: dd.LLMDataDist) -> None:
        source = self.caches[sender.cluster_id][0]
        sender.cache_manager.push_blocks(BlocksCacheKey(receiver.cluster_id, 1), source, [1, 2], [2, 3])

    def arrived(self, at: dd.LLMDataDist) -> bool:
        memory = self.caches[at.cluster_id][2]
        right = bool(np.all(memory[:, 2:] == 7) and np.all(memory[:, :2] == 0xA5))
        memory[:] = 0xA5
        return right


@once_and_lasting
@pytest.mark.parametrize("backend", BACKENDS)
def test_g8_g14_a_link_with_either_side_short(
    make: Callable[..., Pair], backend: str, lasting: bool, caplog: pytest.LogCaptureFixture
) -> None:
    pair = make("B", backend)
    assert pair.up() == SUCCESS
    ways = [link.transport for link in pair.a.links()]
    pair.down()
    kinds = set()
    for shortage in shortages(lasting=lasting):
        before, mapped = leaks.take(), memfds()
        with shortage:
            code = pair.up()
        kinds |= set(shortage.refused)
        assert code in (SUCCESS, LINK_FAILED), (code, shortage.refused)
        if code == SUCCESS:
            for link in pair.a.links():
                assert link.transport in ways or re.search(LIMITS, "; ".join(link.reasons)), link
            error = attempt(pair.pull, pair.a, pair.b)
            assert pair.arrived(pair.a) if error is None else backend == "shm"
            judge(error, shortage, LINK_FAILED)
            error = None
            pair.down()
        else:
            # One that is refused before it has said what it wants is closed: the log of its owner tells why.
            assert re.search(LIMITS, str(pair.a.link_error(2)) + caplog.text), (
                shortage.refused,
                pair.a.link_error(2),
            )
        caplog.clear()
        assert not leaks.differences(before), shortage.refused
        assert memfds(mapped) <= mapped, shortage.refused
        assert pair.up() == SUCCESS
        assert [link.transport for link in pair.a.links()] == ways
        pair.pull(pair.a, pair.b)
        assert pair.arrived(pair.a)
        pair.down()
    assert "socket" in kinds and kinds & {"accept", "watch"}


@once_and_lasting
@pytest.mark.parametrize("dialled", [True, False], ids=["by the reader", "by the owner"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mode", ["A", "B"])
def test_g3_g14_the_first_pull_with_either_side_short(
    make: Callable[..., Pair],
    mode: str,
    backend: str,
    dialled: bool,
    lasting: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The owner's serving thread is started with the first pull over tcp: so each attempt has new engines."""
    for shortage in shortages(lasting=lasting):
        pair = make(mode, backend, serving=False)
        assert pair.up() == SUCCESS
        reader, owner = (pair.a, pair.b) if dialled else (pair.b, pair.a)
        with shortage, little_time(reader):
            error = attempt(pair.pull, reader, owner)
        if backend == "tcp" and getattr(error, "status_code", None) in (LATE, LINK_FAILED):
            # A connection that is closed before its reader has asked, or not dialled: the log says why.
            assert re.search(LIMITS, caplog.text + str(error)), (shortage.refused, error)
            error = None
        caplog.clear()
        judge(error, shortage, OUT, LINK_FAILED)
        assert pair.arrived(reader) or shortage.refused
        if "link again" in str(error):  # the peer's memory was refused, and is given once for each link
            pair.down()
            assert pair.up() == SUCCESS
        for _ in range(2):
            pair.pull(reader, owner)
            assert pair.arrived(reader)


@once_and_lasting
@pytest.mark.parametrize("backend", BACKENDS)
def test_g14_a_push_with_either_side_short(make: Callable[..., Pair], backend: str, lasting: bool) -> None:
    for shortage in shortages(lasting=lasting):
        pair = make("B", backend)
        assert pair.up() == SUCCESS
        with shortage, little_time(pair.a):
            error = attempt(pair.push, pair.a, pair.b)
        if not isinstance(error, LLMException) or error.status_code != LLMStatusCode.LLM_TIMEOUT:
            judge(error, shortage, OUT, LINK_FAILED)
        if "link again" in str(error):
            pair.down()
            assert pair.up() == SUCCESS
        for _ in range(2):
            pair.push(pair.a, pair.b)
            assert pair.arrived(pair.b)


# ---- caches --------------------------------------------------------------------------------------------------------


@once_and_lasting
def test_g14_caches_without_descriptors(make: Callable[..., Pair], lasting: bool) -> None:
    pair = make("B", "shm")
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
def test_g3_many_links_are_left_without_threads(lasting: bool) -> None:
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
def test_g3_a_drain_that_gets_no_thread_has_changed_nothing(make: Callable[..., Pair], lasting: bool) -> None:
    pair = make("B", "local")
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
    make: Callable[..., Pair], lasting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stripes over tcp, movers by address."""
    monkeypatch.setattr(tcp_channel, "STRIPE_NBYTES", 1 << 20)
    for backend in ("tcp", "local"):
        for shortage in shortages(lasting=lasting):
            pair = make("B", backend)
            assert pair.up() == SUCCESS
            pair.a._engine._transports.stream._stripes = 3  # type: ignore[union-attr]
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
            pull(BlocksCacheKey(2, 5), cache, [0, 1], [0, 1])
            assert (destination == 3).all()


# ---- comms ---------------------------------------------------------------------------------------------------------


@once_and_lasting
def test_g14_a_comm_with_either_side_short(lasting: bool) -> None:
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
