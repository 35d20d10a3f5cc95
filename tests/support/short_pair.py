"""Two engines of the test's own process that the system refuses something, and what is judged then."""

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
from llm_datadist import BlocksCacheKey, LLMException, LLMStatusCode, _accepting
from llm_datadist._engine import workers
from llm_datadist.transports import tcp_pool
from tests.support import actors
from tests.support.engines import Engines
from tests.support.shortage import LIMITS, Shortage

SUCCESS = LLMStatusCode.LLM_SUCCESS
OUT, FAILED = LLMStatusCode.LLM_OUT_OF_MEMORY, LLMStatusCode.LLM_FAILED
LINK_FAILED, LATE = LLMStatusCode.LLM_LINK_FAILED, LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT
BACKENDS = ["auto", "shm", "local", "tcp"]

once_and_lasting = pytest.mark.parametrize("lasting", [False, True], ids=["once", "lasting"])


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes what is waited for while something is short happen sooner."""
    monkeypatch.setattr(_accepting, "PATIENCE_S", 0.04)
    monkeypatch.setattr(_accepting, "PAUSE_S", 0.02)
    monkeypatch.setattr(_accepting, "_TELL_AGAIN_S", 0.0)
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
    state.options = replace(whole, sync_kv_timeout_ms=500)
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


class ShortPair(Engines):
    """Two engines of this process: ``a`` dials ``b``; each has a source and a destination."""

    def begin(self, serving: bool) -> ShortPair:
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


@contextlib.contextmanager
def one_at_a_time() -> Iterator[Callable[..., ShortPair]]:
    """Makes pairs; each ends the one before."""
    with contextlib.ExitStack() as stack:

        def make(mode: str, backend: str, *, serving: bool = True) -> ShortPair:
            stack.close()
            return stack.enter_context(ShortPair(mode, backend)).begin(serving)

        yield make
