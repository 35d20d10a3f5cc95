"""Rows G3, G8 and G14: the system refuses something for a moment, at each place of each operation.

Nothing is left behind, nothing says that it is there while it is not, and the same works as soon as there is
something again. The process is the test's own: what it asks for is counted, and the k-th thing is refused.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import llm_datadist as dd
from llm_datadist import BlocksCacheKey, LLMException, LLMStatusCode, _accepting
from llm_datadist.transports import tcp_pool
from tests.support import actors, leaks
from tests.support.engines import Engines
from tests.support.shortage import LIMITS, Shortage, shortages

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


def attempt(call: Callable[..., Any], *args: Any) -> Exception | None:
    try:
        call(*args)
    except Exception as error:
        return error
    return None


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
        pairs.append(Pair(mode, backend, 500))
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
        with shortage:
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
