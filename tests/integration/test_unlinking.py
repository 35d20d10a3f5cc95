"""Unlinking while the other side is busy, when it is interrupted, and in the middle of a pull."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from llm_datadist import BlocksCacheKey, LLMException, LLMStatusCode
from llm_datadist._engine import executor, initiator, receiver
from llm_datadist._engine.initiator import _Pull
from llm_datadist._engine.linking import Linking
from tests.support.engines import Engines, Layers, unlink
from tests.support.pair import COMBOS, MODE_A, SUCCESS, Combo
from tests.support.which_combos import TWO_COMBOS
from tests.support.world import wait_until

NOT_LINKED = LLMStatusCode.LLM_NOT_YET_LINK
DOWN = (LLMStatusCode.LLM_LINK_FAILED, NOT_LINKED)


class Two(Engines):
    """Cluster 1 owns blocks of ones; cluster 2, which dialled it, has somewhere to put them."""

    def __init__(self, combo: Combo) -> None:
        super().__init__(combo.mode, combo.backend, 20_000)
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


class Relay:
    """Calls that follow each other without a gap: each ends when the next one has begun, or none can any more."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call, self._changed = call, threading.Condition()
        self._begun, self.codes = 0, list[LLMStatusCode]()
        self._threads = [threading.Thread(target=self._run) for _ in range(2)]

    def hold(self, monkeypatch: pytest.MonkeyPatch, where: Any, name: str) -> None:
        """What each call does there is when it has begun."""
        do = getattr(where, name)

        def held(*args: Any) -> Any:
            with self._changed:
                self._begun += 1
                mine = self._begun
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._begun > mine or self.codes, 20)
            return do(*args)

        monkeypatch.setattr(where, name, held)

    def _run(self) -> None:
        try:
            while not self.codes:
                self._call()
        except LLMException as error:
            self._end(error.status_code)

    def _end(self, *codes: LLMStatusCode) -> None:
        with self._changed:
            self.codes += codes
            self._changed.notify_all()

    def __enter__(self) -> Relay:
        for thread in self._threads:
            thread.start()
        with self._changed:
            assert self._changed.wait_for(lambda: self._begun > 3, 20)
        return self

    def __exit__(self, *exc: object) -> None:
        if not self.codes:
            self._end(SUCCESS)
        for thread in self._threads:
            thread.join()


@pytest.mark.rule("4.45")
@pytest.mark.parametrize("who", ["the caller", "the peer"])
@pytest.mark.parametrize("how", ["pull", "push"])
def test_g18_an_unlink_ends_beside_calls_that_follow_each_other(
    two: Two, monkeypatch: pytest.MonkeyPatch, how: str, who: str
) -> None:
    """They are refused while it waits, on the side that makes them: those before them end, and so does it."""
    if two.mode == "A" and how == "push":
        pytest.skip("pushes need mode B")
    manager = two.other.cache_manager
    call = manager.push_blocks if how == "push" else manager.pull_blocks
    relay = Relay(lambda: call(BlocksCacheKey(1, 0), two.cache, [1, 3], [1, 3]))
    relay.hold(monkeypatch, receiver if how == "push" else initiator, "move")
    unlinking, cluster_id = (two.other, 1) if who == "the caller" else (two.owner, 2)
    with relay:
        assert unlink(unlinking, cluster_id) == SUCCESS
    assert set(relay.codes) == {NOT_LINKED}
    assert wait_until(lambda: not two.other.links() and not two.owner.links())


@pytest.mark.rule("4.46")
@pytest.mark.parametrize("who", ["the caller", "the peer"])
def test_an_unlink_that_ends_without_success_leaves_the_link_as_it_was(
    two: Two, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    """Of two that wait, the first one's end does not open what the second still holds closed."""
    begun, go_on = threading.Event(), threading.Event()
    move = initiator.move

    def hold(*args: Any) -> None:
        begun.set()
        go_on.wait(20)
        move(*args)

    engine, cluster_id = (two.other, 1) if who == "the caller" else (two.owner, 2)
    link = engine._engine._state.links.get(cluster_id)  # type: ignore[union-attr]
    codes: list[LLMStatusCode] = []
    pull = threading.Thread(target=two.pull)
    longer = threading.Thread(target=lambda: codes.append(unlink(engine, cluster_id, 1000)))
    monkeypatch.setattr(initiator, "move", hold)
    pull.start()
    try:
        assert begun.wait(10)
        monkeypatch.setattr(initiator, "move", move)
        longer.start()
        assert wait_until(lambda: link.context.closing == 1)
        assert unlink(engine, cluster_id, 50) == LLMStatusCode.LLM_LINK_BUSY
        with pytest.raises(LLMException) as caught:
            engine.send_notify(cluster_id, "name", b"")
        assert caught.value.status_code == NOT_LINKED and not codes
        longer.join()
        assert codes == [LLMStatusCode.LLM_LINK_BUSY]
        engine.send_notify(cluster_id, "name", b"")
    finally:
        go_on.set()
        pull.join()
    assert two.pulls()
    assert unlink(engine, cluster_id) == SUCCESS


def _answer(question: Any, linking: Linking) -> None:
    with linking._state.lock:
        over = question.is_over(0.0)
    question.answer(SUCCESS if over else LLMStatusCode.LLM_LINK_BUSY)


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
        def later() -> None:
            if peer == "has let go":
                linking._close_when_idle(link, 0.0)
                link.context.unlinked = True
            asked.set()
            go_on.wait(10)
            link.call_soon(lambda: _answer(answer(linking, link, message), linking))

        threading.Thread(target=later, daemon=True).start()

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
    move, check_owner, resolve = executor.move, _Pull.check_owner, _Pull._resolve

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

    def ask_again(pull: _Pull, *args: Any) -> Any:
        if held.is_set():
            asked.set()
        return resolve(pull, *args)

    monkeypatch.setattr(initiator, "move", move_too_late)
    monkeypatch.setattr(_Pull, "check_owner", ask)
    monkeypatch.setattr(_Pull, "_resolve", ask_again)
    try:
        with pytest.raises(LLMException) as caught:
            two.pull()
    finally:
        asked.set()
    assert caught.value.status_code in DOWN
    assert wait_until(lambda: two.other.links() == [])
