"""§5 the two modes: who is asked for a pull, and how often; and the order in which calls are checked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from llm_datadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKeyByIdAndIndex,
    CacheNotExistError,
    CacheTask,
    DataType,
    NotLinkedError,
    ParamInvalidError,
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from llm_datadist._engine.responder import Responder
from tests.support.engines import Engines, Layers
from tests.support.memory import FILL
from tests.support.pair import COMBOS, SUCCESS, Combo

DESC = CacheDesc(4, [4, 64], DataType.DT_UINT8)


class Two(Engines):
    """Cluster 1 calls; cluster 2 owns a blocks cache (model 0) and slots. ``asked`` counts its questions."""

    def __init__(self, combo: Combo, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(combo.mode, combo.backend)
        self.asked: Counter[str] = Counter()
        for name in ("resolve", "lookup"):
            monkeypatch.setattr(Responder, name, self._counting(name, getattr(Responder, name)))
        self.me, self.peer = self.make(1), self.make(2)
        assert self.link(self.me, 2, self.peer) == SUCCESS
        self.blocks(self.peer, 1, model_id=0)
        self.theirs, _ = self.slots(self.peer, 3)
        self.paged, self.memory = self.blocks(self.me)
        self.mine, self.slot_memory = self.slots(self.me, FILL)
        self.me.check_link_status(2)

    def _counting(self, name: str, answer: Any) -> Any:
        def count(*arguments: Any) -> None:
            self.asked[name] += 1
            answer(*arguments)

        return count

    def slots(self, engine: Any, value: int) -> tuple[Cache, np.ndarray[Any, Any]]:
        memory = self.space(engine, (4, 4, 64), value)
        self._held.append(memory)
        return engine.cache_manager.register_cache(DESC, [t.ctypes.data for t in memory]), memory

    def gone(self) -> Cache:
        """A handle of a contiguous cache that is not registered any more."""
        cache, _ = self.slots(self.me, FILL)
        self.me.cache_manager.unregister_cache(cache.cache_id)
        return cache


@pytest.fixture(params=COMBOS, ids=str)
def two(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Two]:
    with Two(request.param, monkeypatch) as two:
        yield two


@pytest.mark.rule("5.5", "5.9")
@pytest.mark.rule("R.12", "R.13")
def test_every_pull_of_mode_a_asks_its_owner_and_none_of_mode_b(two: Two) -> None:
    for block in range(3):
        two.me.cache_manager.pull_blocks(BlocksCacheKey(2, 0), two.paged, [block], [block])
        two.me.cache_manager.pull_cache(CacheKeyByIdAndIndex(2, two.theirs.cache_id, block), two.mine)
    assert (two.memory[:, :3] == 1).all() and (two.slot_memory[:, 0] == 3).all()
    assert two.asked == ({"resolve": 6} if two.mode == "A" else {})


@pytest.mark.rule("5.13")
def test_a_key_that_is_not_in_the_copy_is_asked_for_once(two: Two) -> None:
    for times in (1, 2):
        with pytest.raises(CacheNotExistError):
            two.me.cache_manager.pull_blocks(BlocksCacheKey(2, 9), two.paged, [0], [0])
        assert two.asked == {"resolve" if two.mode == "A" else "lookup": times}
    assert (two.memory == FILL).all()


# ---- the order of checks ---------------------------------------------------------------------------------

# Each step: what an argument is set to so that this step fails, the error, and what its text holds. A call is
# made with a step and all later ones broken, so whatever is looked at too early shows.
ORDERED = [
    (combo, f"{way}_{kind}")
    for combo in COMBOS
    for way in ("pull", "push")
    for kind in ("cache", "blocks")
    if way == "pull" or combo.mode == "B"
]
Step = tuple[dict[str, Any], type[Exception], str]
OWN, UNLINKED, MISSING = 1, 77, 2


def _by_id(cluster_id: int) -> CacheKeyByIdAndIndex:
    return CacheKeyByIdAndIndex(cluster_id, 999)


def _steps(two: Two, method: str) -> list[Step]:
    pull, blocks = method.startswith("pull"), "blocks" in method
    key, cache = {
        "pull_cache": ("cache_key", "cache"),
        "pull_blocks": ("src_cache_key", "dst_cache"),
        "push_cache": ("dst_cache_key", "src_cache"),
        "push_blocks": ("dst_cache_key", "src_cache"),
    }[method]
    index: Any = "dst_blocks" if pull else "src_blocks"
    if not blocks:
        index = "batch_index" if pull else "src_batch_index"
    make: Any = (lambda c: BlocksCacheKey(c, 9)) if blocks else _by_id
    steps: list[Step] = [
        ({"tensor_num_per_layer": "x"}, TypeError, "tensor_num_per_layer"),
        ({cache: two.gone()}, CacheNotExistError, "not registered"),
        ({index: [99] if blocks else 99}, ParamInvalidError, f"{index}.* is 99"),
        ({key: make(OWN)}, ParamInvalidError, "itself"),
        ({key: make(UNLINKED)}, NotLinkedError, "77"),
        ({key: make(MISSING)}, CacheNotExistError, "9"),
    ]
    return steps if pull else [s for s in steps if s[0].get(key) != make(OWN)]


def _right(two: Two, method: str) -> dict[str, Any]:
    if "blocks" not in method:
        return {"cache" if method == "pull_cache" else "src_cache": two.mine}
    name = "dst_cache" if method == "pull_blocks" else "src_cache"
    return {name: two.paged, "src_blocks": [0], "dst_blocks": [0]}


@pytest.mark.parametrize(("two", "method"), ORDERED, ids=str, indirect=["two"])
@pytest.mark.rule("5.26", "5.27", "5.28", "5.29", "5.30")
def test_the_order_of_checks(two: Two, method: str) -> None:
    steps = _steps(two, method)
    for at, (_, error, text) in enumerate(steps):
        wrong: dict[str, Any] = {}
        for broken, _, _ in reversed(steps[at:]):
            wrong |= broken
        for name in (method, f"{method}_async"):
            with pytest.raises(error, match=text) as caught:
                answer = getattr(two.me.cache_manager, name)(**{**_right(two, method), **wrong})
                if isinstance(answer, CacheTask):  # what concerns the peer is its result
                    assert error in (NotLinkedError, CacheNotExistError)
                    answer.synchronize(5000)
                    raise answer.exception(0) or AssertionError("no error")
            assert type(caught.value) is error, steps[at]
    assert (two.memory == FILL).all() and (two.slot_memory == FILL).all()


@pytest.mark.rule("5.26", "5.27", "5.28", "5.30")
def test_the_order_of_checks_of_a_layer_wise_task(two: Two) -> None:
    def config(cluster_id: int, batch: int = 0) -> Any:
        if two.mode == "A":
            return TransferConfig(cluster_id, [4096] * 4, None, batch)
        return TransferWithCacheKeyConfig(_by_id(cluster_id), range(2), range(2), batch)

    def start(cache: Cache, batch: int, nbytes: Any) -> CacheTask:
        return two.me.cache_manager.transfer_cache_async(
            cache, Layers(), [config(UNLINKED, batch), config(MISSING)], None, None, nbytes
        )

    with pytest.raises(TypeError, match="dst_block_memory_size"):
        start(two.gone(), 99, "x")
    with pytest.raises(CacheNotExistError):
        start(two.gone(), 99, None)
    with pytest.raises(ParamInvalidError, match="src_batch_index is 99"):
        start(two.mine, 99, None)
    task = start(two.mine, 0, None)
    missing = "LLM_PARAM_INVALID" if two.mode == "A" else "LLM_KV_CACHE_NOT_EXIST"
    assert [code.name for code in task.get_results(5000) if code] == ["LLM_NOT_YET_LINK", missing]
