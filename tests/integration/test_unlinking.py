"""Unlinking while the other side is busy, when it is interrupted, and in the middle of a pull."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from llm_datadist import BlocksCacheKey, LLMException, LLMStatusCode
from llm_datadist._engine import executor, initiator
from llm_datadist._engine.initiator import _Pull
from llm_datadist._engine.linking import Linking
from tests.support.engines import Engines, Layers, unlink
from tests.support.pair import COMBOS, MODE_A, SUCCESS, Combo
from tests.support.which_combos import TWO_COMBOS
from tests.support.world import wait_until

DOWN = (LLMStatusCode.LLM_LINK_FAILED, LLMStatusCode.LLM_NOT_YET_LINK)


class Two(Engines):
    """Cluster 1 owns blocks of ones; cluster 2, which dialled it, has somewhere to put them."""

    def __init__(self, combo: Combo) -> None:
        super().__init__(combo.mode, combo.backend)
        self.owner, self.other = self.make(1), self.make(2)
        assert self.link(self.other, 1, self.owner) == SUCCESS
        self.blocks(self.owner, 1, model_id=0)
        self.cache, self.memory = self.blocks(self.other)

    def pull(self) -> None:
        self.other.cache_manager.pull_blocks(BlocksCacheKey(1, 0), self.cache, [1], [2])

    def pulls(self) -> bool:
        self.memory[:] = 0xA5
        self.pull()
        return bool((self.memory[:, 2] == 1).all() and (self.memory[:, :2] == 0xA5).all())


@pytest.fixture(params=COMBOS, ids=str)
def two(request: pytest.FixtureRequest) -> Iterator[Two]:
    with Two(request.param) as two:
        yield two


@pytest.fixture(params=MODE_A, ids=str)
def two_a(request: pytest.FixtureRequest) -> Iterator[Two]:
    with Two(request.param) as two:
        yield two


@pytest.mark.rule("4.46")
@pytest.mark.parametrize("timeout", [100, 300])
def test_a_task_between_two_layers_at_the_other_side_keeps_the_link(two: Two, timeout: int) -> None:
    source, _ = two.blocks(two.other, 7)
    _, into = two.blocks(two.owner, model_id=1)
    layers = Layers(hold=True)
    task = two.push_layers(two.other, source, (1, 1, into), layers)
    assert layers.reached.wait(10)
    assert unlink(two.owner, 2, timeout) == LLMStatusCode.LLM_LINK_BUSY
    assert [len(engine.links()) for engine in (two.owner, two.other)] == [1, 1]
    two.owner.check_link_status(2)
    layers.go_on.set()
    assert task.synchronize(5000) == SUCCESS
    assert (into[:, 3] == 7).all() and (into[:, :3] == 0xA5).all()
    assert unlink(two.owner, 2) == SUCCESS


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("two", TWO_COMBOS, ids=str, indirect=True)
@pytest.mark.parametrize("peer", ["has not answered", "has let go"])
def test_an_unlink_that_is_interrupted_leaves_no_half_of_a_link(
    two: Two, monkeypatch: pytest.MonkeyPatch, peer: str
) -> None:
    asked, go_on = threading.Event(), threading.Event()
    answer: Any = Linking.unlink_asked

    def slow(linking: Linking, link: Any, message: Any) -> None:
        if peer == "has let go":
            linking._close_when_idle(link, 0.0)
            link.context.unlinked = True
        asked.set()
        go_on.wait(10)
        answer(linking, link, message)

    def press() -> None:
        assert asked.wait(10)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    monkeypatch.setattr(Linking, "unlink_asked", slow)
    before = signal.signal(signal.SIGUSR1, _interrupt)
    presser = threading.Thread(target=press)
    presser.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            unlink(two.other, 1, 10_000)
    finally:
        presser.join()
        signal.signal(signal.SIGUSR1, before)
    assert two.other.links() == []
    assert two.link(two.other, 1, two.owner) == SUCCESS
    assert two.pulls()
    go_on.set()
    assert two.pulls()
    assert len(two.owner.links()) == 1


def test_a_pull_under_an_unlink_with_force_knows_that_the_link_went(
    two_a: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the reader's control thread learns of the end only when somebody asks it; the lease is gone before."""
    two = two_a
    two.pull()
    assert two.other._engine is not None
    service = two.other._engine._state.links
    held, asked = threading.Event(), threading.Event()
    move, check_owner = executor.move, _Pull.check_owner

    def hold() -> None:
        held.set()
        asked.wait(10)

    def move_too_late(*args: Any) -> None:
        service.call_at(0.0, hold)
        assert held.wait(10)
        assert unlink(two.owner, 2, force=True) == SUCCESS
        assert wait_until(lambda: [c.leases for c in two.owner.cache_manager.caches()] == [0])
        move(*args)

    def ask(pull: _Pull) -> None:
        asked.set()
        check_owner(pull)

    monkeypatch.setattr(initiator, "move", move_too_late)
    monkeypatch.setattr(_Pull, "check_owner", ask)
    try:
        with pytest.raises(LLMException) as caught:
            two.pull()
    finally:
        asked.set()
    assert caught.value.status_code in DOWN
    assert wait_until(lambda: two.other.links() == [])
