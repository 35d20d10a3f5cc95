"""Callbacks of background transfers: code of the user's, which may do all that a caller may and hold up nobody."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from llm_datadist import BlocksCacheKey, CacheTask, LLMStatusCode
from llm_datadist._engine import background
from tests.support.engines import Engines, Layers, unlink
from tests.support.pair import COMBOS, SUCCESS, Combo

LOST = LLMStatusCode.LLM_LINK_FAILED
ENDS = ["complete", "layers cut off", "pull cut off"]


class Three(Engines):
    """Clusters 1 and 3 own blocks of ones and threes; cluster 2 is linked to both."""

    def __init__(self, combo: Combo, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(combo.mode, combo.backend)
        self._monkeypatch = monkeypatch
        self.first, self.other, self.me = self.make(1), self.make(3), self.make(2)
        self.relink()
        assert self.link(self.me, 3, self.other) == SUCCESS
        _, self.owned = self.blocks(self.first, 1, model_id=0)
        self.blocks(self.other, 3, model_id=0)
        self.cache, self.memory = self.blocks(self.me)
        self.source, _ = self.blocks(self.me, 7)
        self.into, _ = self.blocks(self.me)

    def relink(self) -> None:
        assert self.link(self.me, 1, self.first) == SUCCESS

    def pull_from_other(self) -> bool:
        self.memory[:] = 0xA5
        self.me.cache_manager.pull_blocks(BlocksCacheKey(3, 0), self.cache, [1], [2])
        return bool((self.memory[:, 2] == 3).all())

    def ended_by(self, how: str, fn: Callable[[CacheTask], object]) -> CacheTask:
        """A task with ``fn`` as its callback that has ended; what ends it is found on the control thread."""
        layers = Layers(hold=True)
        if how == "pull cut off":
            self._monkeypatch.setattr(background, "_PER_LINK", 0)  # its turn never comes
            task = self.me.cache_manager.pull_blocks_async(BlocksCacheKey(1, 0), self.into, [0], [0])
        else:
            task = self.push_layers(self.me, self.source, (1, 0, self.owned), layers)
            assert layers.reached.wait(10)
        task.add_done_callback(fn)
        if how != "complete":
            assert unlink(self.first, 2, force=True) == SUCCESS
        else:
            layers.go_on.set()
        assert task.synchronize(5000) == (SUCCESS if how == "complete" else LOST)
        layers.go_on.set()
        return task


@pytest.fixture(params=COMBOS, ids=str)
def three(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Three]:
    with Three(request.param, monkeypatch) as three:
        yield three


@pytest.mark.parametrize("how", ENDS)
@pytest.mark.rule("5.117")
def test_a_callback_may_do_all_that_a_caller_may(three: Three, how: str) -> None:
    told: list[Any] = []
    done = threading.Event()

    def use_everything(task: CacheTask) -> None:
        try:
            told.append(three.pull_from_other())
            three.me.check_link_status(3)
            if three.mode == "B":
                three.me.cache_manager.push_blocks(BlocksCacheKey(3, 0), three.source, [0], [0])
            told.append(unlink(three.me, 1))
            told.append(three.link(three.me, 1, three.first))
        except BaseException as exc:
            told.append(exc)
        finally:
            done.set()

    three.ended_by(how, use_everything)
    assert done.wait(10)
    assert told == [True, SUCCESS, SUCCESS]


@pytest.mark.parametrize("how", ENDS)
def test_a_callback_that_sleeps_holds_up_nobody(three: Three, how: str) -> None:
    sleeping, wake = threading.Event(), threading.Event()

    def sleep(task: CacheTask) -> None:
        sleeping.set()
        wake.wait(20)

    three.ended_by(how, sleep)
    try:
        assert sleeping.wait(10)
        assert three.pull_from_other()
        three.me.check_link_status(3)
        if how != "complete":
            three.relink()
        assert three.link(three.other, 1, three.first) == SUCCESS
    finally:
        wake.set()
