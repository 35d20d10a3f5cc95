"""Section 5: pushes are for mode B; the order of checks is local cache, then parameters, then link."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from llm_datadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKeyByIdAndIndex,
    CacheManager,
    CacheNotExistError,
    DataType,
    LLMDataDist,
    LLMRole,
    ParamInvalidError,
)

DESC = CacheDesc(1, [2, 8], DataType.DT_UINT8)
Push = Callable[[CacheManager, Cache], object]
PUSHES: dict[str, Push] = {
    "push_cache": lambda m, c: m.push_cache(CacheKeyByIdAndIndex(2, 1), c),
    "push_cache_async": lambda m, c: m.push_cache_async(CacheKeyByIdAndIndex(2, 1), c),
    "push_blocks": lambda m, c: m.push_blocks(BlocksCacheKey(2), c, [0], [1]),
    "push_blocks_async": lambda m, c: m.push_blocks_async(BlocksCacheKey(2), c, [0], [1]),
}


@pytest.fixture
def managed() -> Iterator[CacheManager]:
    engine = LLMDataDist(LLMRole.MIX, 1)
    engine.init({"llm.EnableCacheManager": "1"})
    yield engine.cache_manager
    engine.finalize()


@pytest.mark.parametrize("push", PUSHES.values(), ids=PUSHES)
@pytest.mark.rule("5.3", "5.27", "5.70", "5.79")
@pytest.mark.rule("R.14")
def test_pushes_are_for_mode_b_and_an_unknown_cache_comes_first(push: Push, managed: CacheManager) -> None:
    memory = np.zeros((2, 8), np.uint8)
    cache = managed.register_blocks_cache(DESC, [memory.ctypes.data])
    with pytest.raises(ParamInvalidError, match=r"LLMConfig\.enable_remote_cache_accessible"):
        push(managed, cache)
    managed.unregister_cache(cache.cache_id)
    with pytest.raises(CacheNotExistError):
        push(managed, cache)
