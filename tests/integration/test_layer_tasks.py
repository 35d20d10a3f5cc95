"""§5 transfer_cache_async: several configs of one task, its synchronizer, and a destination that does not answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llm_datadist import (
    BlocksCacheKey,
    CacheDesc,
    CacheKeyByIdAndIndex,
    DataType,
    LayerSynchronizer,
    LLMStatusCode,
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from llm_datadist.testing.stopwatch import Stopwatch
from tests.integration.test_layerwise import FOUR, Target
from tests.integration.test_layerwise import _run as run_task
from tests.support import actors
from tests.support.engines import Engines, Layers
from tests.support.memory import FILL
from tests.support.pair import COMBOS, D_ID, SUCCESS, Combo, Pair, of_model
from tests.support.world import World

INVALID, TIMEOUT = LLMStatusCode.LLM_PARAM_INVALID, LLMStatusCode.LLM_TIMEOUT
GONE = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST


class Calls(LayerSynchronizer):
    """Notes what it is called with; says no at one layer."""

    def __init__(self, fail: int | None = None) -> None:
        self.calls: list[tuple[int, int | None]] = []
        self._fail = fail

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        self.calls.append((layer_index, timeout_in_millis))
        return layer_index != self._fail


class Two(Engines):
    """Cluster 1 has four layers of three blocks, each byte its tensor's number; cluster 2 two caches for them."""

    def __init__(self, combo: Combo, timeout_ms: int = 5000) -> None:
        super().__init__(combo.mode, combo.backend, timeout_ms)
        self.me, self.peer = self.make(1), self.make(2)
        assert self.link(self.me, 2, self.peer) == SUCCESS
        self.memory = self.space(self.me, (8, 3, 64), 0)
        self.memory += np.arange(1, 9, dtype=np.uint8)[:, None, None]
        self.memory += np.arange(3, dtype=np.uint8)[None, :, None] * 16
        self.source = self.register(self.me, self.memory)
        self.into = [self.space(self.peer, (8, 3, 64)) for _ in range(2)]
        for model_id, memory in enumerate(self.into):
            self.register(self.peer, memory, model_id)

    def config(self, model_id: int, src: range, dst: range) -> Any:
        if self.mode == "B":
            return TransferWithCacheKeyConfig(BlocksCacheKey(2, model_id), src, dst)
        tensors = self.into[model_id][2 * dst.start : 2 * dst.stop]
        return TransferConfig(2, [t.ctypes.data for t in tensors], src)

    def push(self, synchronizer: LayerSynchronizer, *configs: Any) -> Any:
        """Block 1 of the source to block 2."""
        return self.me.cache_manager.transfer_cache_async(self.source, synchronizer, configs, [1], [2], 64)

    def right(self, model_id: int, src: range, dst: range) -> bool:
        """Whether exactly these layers are there."""
        want = np.full((8, 3, 64), FILL, np.uint8)
        want[2 * dst.start : 2 * dst.stop, 2] = self.memory[2 * src.start : 2 * src.stop, 1]
        return np.array_equal(self.into[model_id], want)


@pytest.fixture(params=COMBOS, ids=str)
def two(request: pytest.FixtureRequest) -> Iterator[Two]:
    with Two(request.param) as two:
        yield two


@pytest.fixture(params=COMBOS, ids=str)
def hasty(request: pytest.FixtureRequest) -> Iterator[Two]:
    with Two(request.param, timeout_ms=400) as two:
        yield two


@pytest.mark.rule("5.106", "5.107")
def test_each_layer_is_computed_once_and_goes_to_every_config_that_has_it(two: Two) -> None:
    first, second = (range(1, 4), range(0, 3)), (range(0, 2), range(2, 4))
    synchronizer = Calls()
    task = two.push(synchronizer, two.config(0, *first), two.config(1, *second))
    assert task.get_results(5000) == [SUCCESS, SUCCESS]
    assert synchronizer.calls == [(layer, None) for layer in range(4)]
    assert two.right(0, *first) and two.right(1, *second)


@pytest.mark.rule("5.106")
def test_a_layer_that_no_config_has_is_not_computed(two: Two) -> None:
    synchronizer = Calls()
    parts = (range(0, 1), range(3, 4))
    task = two.push(synchronizer, *(two.config(at, part, part) for at, part in enumerate(parts)))
    assert task.get_results(5000) == [SUCCESS, SUCCESS]
    assert synchronizer.calls == [(0, None), (3, None)]


@pytest.mark.rule("5.109")
def test_a_synchronizer_that_says_no_ends_only_what_is_not_finished(two: Two) -> None:
    short, long = (range(0, 1), range(0, 1)), (range(0, 3), range(1, 4))
    task = two.push(Calls(fail=1), two.config(0, *short), two.config(1, *long))
    assert task.get_results(5000) == [SUCCESS, INVALID]
    assert two.right(0, *short) and two.right(1, range(0, 1), range(1, 2))


def test_g10_a_synchronizer_that_forgets_to_answer_is_told_what_it_returned(two: Two) -> None:
    forgetful: Any = Calls()
    forgetful.synchronize_layer = lambda layer, timeout: None
    error = two.push(forgetful, two.config(0, range(0, 1), range(0, 1))).exception(5000)
    assert "synchronize_layer(0) returned None, not True" in str(error)


@pytest.mark.rule("5.97")
def test_configs_are_not_modified(two: Two) -> None:
    config = two.config(0, range(1, 3), range(0, 2))
    names = [n for n in dir(type(config)) if isinstance(getattr(type(config), n), property)]
    before = [getattr(config, name) for name in names]
    assert two.push(Calls(), config).synchronize(5000) == SUCCESS
    assert [getattr(config, name) for name in names] == before


@pytest.mark.rule("5.101", "5.102")
def test_without_block_lists_block_0_of_a_blocks_cache_is_sent(two: Two) -> None:
    memory = np.full((8, 3, 64), FILL, np.uint8)
    desc = CacheDesc(8, [3, 64], DataType.DT_UINT8)
    cache = two.peer.cache_manager.register_cache(desc, [t.ctypes.data for t in memory])
    layers = range(4)
    config: Any = TransferConfig(2, [t.ctypes.data + 64 for t in memory], layers, 2)
    if two.mode == "B":
        config = TransferWithCacheKeyConfig(CacheKeyByIdAndIndex(2, cache.cache_id, 1), layers, layers, 2)
    task = two.me.cache_manager.transfer_cache_async(two.source, Calls(), [config])
    assert task.synchronize(5000) == SUCCESS
    assert np.array_equal(memory[:, 1], two.memory[:, 0])
    assert (memory[:, [0, 2]] == FILL).all()


@pytest.mark.rule("6.30", "6.31")
def test_unregister_waits_for_a_task_of_its_cache_and_then_cuts_it_off(hasty: Two) -> None:
    two, layers = hasty, Layers(hold=True)
    task = two.push(layers, two.config(0, range(0, 2), range(0, 2)))
    assert layers.reached.wait(10)
    watch = Stopwatch()
    two.me.cache_manager.unregister_cache(two.source.cache_id)
    assert watch.about(0.4)
    assert task.get_results(0) == [GONE]
    layers.go_on.set()
    assert task.synchronize(5000) == GONE
    assert two.right(0, range(0, 1), range(0, 1))


# ---- a destination that is stopped ---------------------------------------------------------------------------


def _where(w: World, name: str) -> tuple[int, int]:
    mapping = w.held[name].mapping
    return mapping.address, mapping.nbytes


def _looked_at_from_outside(pid: int, address: int, nbytes: int) -> bytes:
    """Memory of a process, whether it runs or not."""
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        memory.seek(address)
        return memory.read(nbytes)


@pytest.mark.parametrize(
    ("combo", "what"),
    [*((c, "layers") for c in COMBOS if c.backend != "shm"), (Combo("B", "tcp"), "push")],
    ids=str,
)
@pytest.mark.rule("5.1", "5.2", "5.120", "5.123", "5.127", "S.6")
def test_a_stopped_destination_is_written_by_nobody(pair: Pair, what: str) -> None:
    pair.up(timeout_ms=1000, HeartbeatIntervalMs="5000")
    pair.source(shape=FOUR)
    pair.destination(shape=FOUR, model_id=0)
    target = Target(pair, range(4), range(4))
    address, nbytes = pair.d.call(_where, "dst")
    pair.d.stop()
    if what == "push":
        outcome = pair.p.attempt(actors.push_blocks, of_model(0, D_ID), "src", [1], [2]).expect(TIMEOUT)
    else:
        outcome = pair.p.attempt(run_task, [target.config], {}, [1], [2], FOUR.stride)
        assert outcome.ok()[:2] == (TIMEOUT, [TIMEOUT])
    assert outcome.took.about(1.0)
    assert set(_looked_at_from_outside(pair.d.pid, address, nbytes)) == {FILL}
    pair.d.cont()
    actors.pause(0.3)
    pair.unchanged()
    assert pair.p.call(run_task, [target.config], {}, [3], [1], FOUR.stride)[0] == SUCCESS
    pair.blocks_right([3], [1])
