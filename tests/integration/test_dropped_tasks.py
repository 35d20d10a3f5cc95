"""Tasks whose outcome nobody looks at: a failed one says so, once; and one whose layers never come still ends."""

from __future__ import annotations

import asyncio
import gc
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from llm_datadist import BlocksCacheKey, CacheTask, LayerSynchronizer, LLMStatusCode
from llm_datadist._engine import dropped
from llm_datadist.testing.stopwatch import Stopwatch
from tests.support.engines import Engines, Layers, unlink
from tests.support.pair import COMBOS, SUCCESS, Combo
from tests.support.world import wait_until

MISSING = BlocksCacheKey(1, 77)
DROPPED = "dropped without being asked"


class Two(Engines):
    """Cluster 1 owns a cache; cluster 2 pulls from it and pushes to it."""

    def __init__(self, combo: Combo) -> None:
        super().__init__(combo.mode, combo.backend, timeout_ms=700)
        self.owner, self.caller = self.make(1), self.make(2)
        assert self.link(self.caller, 1, self.owner) == SUCCESS
        _, self.there = self.blocks(self.owner, 1, model_id=0)
        self.cache, _ = self.blocks(self.caller)

    def pull(self, key: BlocksCacheKey = MISSING) -> CacheTask:
        return self.caller.cache_manager.pull_blocks_async(key, self.cache, [1], [2])

    def push(self, synchronizer: LayerSynchronizer) -> CacheTask:
        return self.push_layers(self.caller, self.cache, (1, 0, self.there), synchronizer)


@pytest.fixture(params=[c for c in COMBOS if c.backend != "shm"], ids=str)
def two(request: pytest.FixtureRequest) -> Iterator[Two]:
    with Two(request.param) as two:
        yield two


@pytest.fixture
def b_local() -> Iterator[Two]:
    with Two(Combo("B", "local")) as two:
        yield two


def _told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "llm_datadist.tasks"]


def _told_once(caplog: pytest.LogCaptureFixture) -> str:
    assert wait_until(lambda: bool(_told(caplog)), 10)
    (text,) = _told(caplog)
    assert [r.levelno for r in caplog.records if r.name == "llm_datadist.tasks"] == [logging.WARNING]
    assert DROPPED in text
    return text


def _looked(engine: Any) -> None:
    """The engine has looked once more than it had to."""
    engine._engine._state.dropped._tell_gone()


def test_g19_a_failed_pull_that_is_dropped_is_told_once(two: Two, caplog: pytest.LogCaptureFixture) -> None:
    two.pull()
    text = _told_once(caplog)
    assert "background pull by BlocksCacheKey" in text and "cluster 1" in text and "model_id=77" in text
    two.caller.finalize()
    assert len(_told(caplog)) == 1


def test_g19_one_that_cannot_even_begin(two: Two, caplog: pytest.LogCaptureFixture) -> None:
    two.pull(BlocksCacheKey(9, 0))
    assert "no link to cluster 9" in _told_once(caplog)


async def _await(task: CacheTask) -> None:
    await task


ASKING: dict[str, Callable[[CacheTask], object]] = {
    "synchronize": lambda task: task.synchronize(),
    "get_results": lambda task: task.get_results(),
    "exception": lambda task: task.exception(),
    "await": lambda task: asyncio.run(_await(task)),
    "callback": lambda task: (task.add_done_callback(lambda done: done.exception()), _ended(task)),
    "cancel": lambda task: (task.cancel(), task.add_done_callback(lambda done: done.get_results())),
}
NOT_ASKING: dict[str, Callable[[CacheTask], object]] = {
    "nothing": lambda task: None,
    "done": lambda task: _ended(task),
    "repr": lambda task: (_ended(task), repr(task)),
    "a callback that does not look": lambda task: (task.add_done_callback(lambda done: None), _ended(task)),
}


def _ended(task: CacheTask) -> None:
    assert wait_until(task.done, 10)


@pytest.mark.parametrize("how", ASKING)
def test_g19_who_asked_is_not_told(b_local: Two, how: str, caplog: pytest.LogCaptureFixture) -> None:
    task = b_local.pull()
    ASKING[how](task)
    del task
    _looked(b_local.caller)
    assert _told(caplog) == []


@pytest.mark.parametrize("how", NOT_ASKING)
def test_g19_what_does_not_ask(b_local: Two, how: str, caplog: pytest.LogCaptureFixture) -> None:
    task = b_local.pull()
    NOT_ASKING[how](task)
    del task
    _told_once(caplog)


def test_g19_success_is_not_told(b_local: Two, caplog: pytest.LogCaptureFixture) -> None:
    task = b_local.pull(BlocksCacheKey(1, 0))
    _ended(task)
    del task
    _looked(b_local.caller)
    assert _told(caplog) == []


def test_g19_one_that_is_kept_is_not_told_before_it_goes(
    b_local: Two, caplog: pytest.LogCaptureFixture
) -> None:
    task = b_local.pull()
    _ended(task)
    watched = b_local.caller._engine._state.dropped  # type: ignore[union-attr]
    assert wait_until(lambda: watched._pause_s > dropped._FIRST_LOOK_S, 10), (
        "looked at once, it is looked at again"
    )
    assert _told(caplog) == []
    del task
    _told_once(caplog)


def test_g19_no_code_of_ours_runs_where_a_task_is_dropped(
    b_local: Two, caplog: pytest.LogCaptureFixture
) -> None:
    """It may be the collector, under any lock: of the engine, of logging, of the task book."""
    task = b_local.pull()
    _ended(task)
    cycle: list[Any] = [task]
    cycle.append(cycle)
    state, seen = b_local.caller._engine._state, []  # type: ignore[union-attr]
    ours = lambda frame, event, argument: seen.append(frame.f_code.co_filename) if event == "call" else None  # noqa: E731
    with state.lock, state.dropped._lock:
        del task, cycle
        sys.setprofile(ours)
        gc.collect()
        sys.setprofile(None)
    assert not [name for name in seen if "llm_datadist" in name]
    _told_once(caplog)


def test_g19_a_task_that_finalize_ends_is_told(b_local: Two, caplog: pytest.LogCaptureFixture) -> None:
    layers = Layers(hold=True)
    b_local.push(layers)
    assert layers.reached.wait(10)
    watch = Stopwatch()
    b_local.caller.finalize()
    assert watch.within(2)
    layers.go_on.set()
    assert "to clusters 1 failed" in _told_once(caplog)


def test_g19_nothing_is_said_when_the_interpreter_ends() -> None:
    script = """
import numpy as np, llm_datadist as dd
engine = dd.LLMDataDist(dd.LLMRole.MIX, 1)
engine.init(dd.LLMConfig().generate_options() | {"llm.EnableCacheManager": "1"})
memory = np.zeros(64, np.uint8)
cache = engine.cache_manager.register_blocks_cache(dd.CacheDesc(1, [4, 16], dd.DataType.DT_UINT8), [memory.ctypes.data])
task = engine.cache_manager.pull_blocks_async(dd.BlocksCacheKey(9), cache, [1], [2])
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# ---- layers that do not come ------------------------------------------------------------------------------------


class Raising(LayerSynchronizer):
    """The forward pass raises in its second layer."""

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        if layer_index:
            raise ValueError("no such expert")
        return True


def test_g19_a_forward_pass_that_raises_ends_its_task(two: Two, caplog: pytest.LogCaptureFixture) -> None:
    watch = Stopwatch()
    task = two.push(Raising())
    _ended(task)
    assert watch.within(1)
    assert repr(task) == f"<CacheTask {LLMStatusCode.LLM_FAILED}>"
    del task
    text = _told_once(caplog)
    assert "layer-wise push of cache 1 to clusters 1" in text
    assert "synchronize_layer(1) raised ValueError: no such expert" in text


@pytest.mark.parametrize("how", ["cancel", "unlink", "unregister", "finalize"])
def test_g19_a_forward_pass_that_never_signals_again(two: Two, how: str) -> None:
    """The synchronizer's time is its own; but all that ends a transfer ends such a task at once."""
    layers = Layers(hold=True)
    task = two.push(layers)
    assert layers.reached.wait(10)
    try:
        ending = threading.Thread(target=_end, args=(two, task, how))
        ending.start()
        code = task.synchronize(5000)
        ending.join(10)
        assert not ending.is_alive()
    finally:
        layers.go_on.set()
    assert (
        code
        == {
            "cancel": LLMStatusCode.LLM_FAILED,
            "unlink": LLMStatusCode.LLM_LINK_FAILED,
            "unregister": LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
            "finalize": LLMStatusCode.LLM_ENGINE_FINALIZED,
        }[how]
    )


def _end(two: Two, task: CacheTask, how: str) -> None:
    if how == "cancel":
        task.cancel()
    elif how == "unlink":
        unlink(two.caller, 1, force=True)
    elif how == "unregister":
        two.caller.cache_manager.unregister_cache(two.cache.cache_id)
    else:
        two.caller.finalize()
