"""Mode B: a cache with more keys than one message holds is announced in portions and found by each of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from llm_datadist import CacheDesc, CacheKey, DataType
from llm_datadist._engine.handler import Handler
from llm_datadist._engine.responder import Responder
from tests.support.engines import Engines, unlink
from tests.support.pair import MODE_B, SUCCESS, Combo

KEYS = 20_000


@pytest.mark.parametrize("combo", MODE_B, ids=str)
@pytest.mark.parametrize("linked_first", [False, True], ids=["then linked", "linked before"])
def test_a_cache_with_twenty_thousand_keys(
    combo: Combo, linked_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    portions: list[tuple[int, bool]] = []
    announced = Handler._announced

    def note(handler: Any, link: Any, frame: Any, message: Any) -> None:
        if link.cluster_id == 1:
            portions.append((len(message.entry.keys), message.more_keys))
        announced(handler, link, frame, message)

    monkeypatch.setattr(Handler, "_announced", note)
    monkeypatch.setattr(Responder, "lookup", lambda *_: pytest.fail("a key was not announced"))
    memory = np.full(4, 0xA5, np.uint8)
    with Engines("B", combo.backend) as engines:
        owner, reader = engines.make(1), engines.make(2)
        values = engines.space(owner, (KEYS,))
        values[:] = np.random.default_rng(3).integers(0, 256, KEYS, dtype=np.uint8)
        if linked_first:
            assert engines.link(reader, 1, owner) == SUCCESS
        keys = [CacheKey(0, 2**63 + i, 5) for i in range(KEYS)]
        desc = CacheDesc(1, [KEYS, 1], DataType.DT_UINT8)
        owner.cache_manager.register_cache(desc, [values.ctypes.data], keys)
        if not linked_first:
            assert engines.link(reader, 1, owner) == SUCCESS
        reader.check_link_status(1)
        assert [n for n, _ in portions] == [1024] * 19 + [KEYS - 19 * 1024]
        assert [more for _, more in portions] == [False] + [True] * 19
        into = reader.cache_manager.register_blocks_cache(
            CacheDesc(1, [4, 1], DataType.DT_UINT8), [memory.ctypes.data]
        )
        for at in (0, KEYS // 2, KEYS - 1):
            reader.cache_manager.pull_blocks(CacheKey(1, 2**63 + at, 5), into, [], [2])
            assert memory.tolist() == [0xA5, 0xA5, values[at], 0xA5]
        assert unlink(reader, 1) == SUCCESS
        assert engines.link(reader, 1, owner) == SUCCESS


def test_an_announcement_larger_than_a_message_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys whose every number is as long as it gets: 60,000 do not fit into 4 MiB."""
    count = 60_000
    values = np.zeros(count, np.uint8)
    with Engines("B", "local", timeout_ms=30_000) as engines:
        owner, reader = engines.make(1), engines.make(2)
        assert engines.link(reader, 1, owner) == SUCCESS
        keys = [CacheKey(0, 2**63 + i, 2**63) for i in range(count)]
        desc = CacheDesc(1, [count, 1], DataType.DT_UINT8)
        owner.cache_manager.register_cache(desc, [values.ctypes.data], keys)
        reader.check_link_status(1)
        assert [len(engine.links()) for engine in (owner, reader)] == [1, 1]
