"""An interrupt at any step of a call leaves nothing of it: not in pools, registry, links or outboxes, nor in flight."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from llm_datadist import BlocksCacheKey
from llm_datadist._engine.errands import Errand
from llm_datadist._shortages import start_thread
from llm_datadist.transports import movers
from tests.support.engines import Engines
from tests.support.interrupted import (
    END_S,
    INTERRUPTED,
    NEEDS_B,
    SOME,
    Allocate,
    Call,
    Copy,
    Deallocate,
    Link,
    Pull,
    PullAsync,
    PullOne,
    Push,
    PushLayers,
    Register,
    RemoveKey,
    Send,
    Take,
    TakeOver,
    Two,
    Unlink,
    UnlinkBusy,
    Unregister,
    skip_in_a,
    strike_all,
)  # fmt: skip
from tests.support.memory import FILL
from tests.support.pair import SUCCESS
from tests.support.steps import Steps, signals_elsewhere, two_signals
from tests.support.world import wait_until

CALLS: list[Callable[[], Call]] = [
    Allocate, Deallocate, Register, TakeOver, Unregister, RemoveKey, Link, Unlink, UnlinkBusy, Pull, PullOne,
    PullAsync, Push, PushLayers, Copy, Send, Take,
]  # fmt: skip
IN_THE_CALLER: list[object] = [Pull, PullOne, Copy]
# What strikes while the interpreter takes a generator down it reports, and goes on.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
SOME_OF_THE_ENGINE = [pytest.param(61, id="some"), pytest.param(1, id="all", marks=pytest.mark.slow)]


def in_one_combo(calls: list[Callable[[], Call]]) -> pytest.MarkDecorator:
    """Each call in each combo; quickly in one, the next for the next call."""
    params = []
    for i, make in enumerate(calls):
        combos = [combo for combo in INTERRUPTED if combo.mode == "B" or make not in NEEDS_B]
        for combo in combos:
            name = f"{combo}-{make.__name__}"  # type: ignore[attr-defined]
            marks = [] if combo is combos[i % len(combos)] else [pytest.mark.slow]
            params.append(pytest.param(combo, make, id=name, marks=marks))
    return pytest.mark.parametrize(("two", "make"), params, indirect=["two"])


@pytest.mark.parametrize("stride", SOME)
@pytest.mark.parametrize("make", CALLS, ids=lambda c: c.__name__)
def test_g12_an_interrupt_at_any_step_leaves_nothing(two: Two, make: Callable[[], Call], stride: int) -> None:
    skip_in_a(two, make)

    def strike(number: int, call: Callable[[], None]) -> object:
        steps = Steps(number)
        return steps.where if steps.run(call) else None

    assert strike_all(two, make(), stride, strike) > 20


class HandedIn:
    """The queue of a desk, which knows whether all that was put into it has been done."""

    def __init__(self, desk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self._queue, self._put = desk._queue, []
        self._done: dict[int, object] = {}  # by id; holds them, so that no id comes twice
        self.get, self.get_nowait = desk._queue.get, desk._queue.get_nowait
        do = Errand.do

        def note(errand: Errand[Any], *, is_alone: bool = False) -> None:
            do(errand, is_alone=is_alone)
            self._done[id(errand)] = errand

        monkeypatch.setattr(desk, "_queue", self)
        monkeypatch.setattr(Errand, "do", note)

    def put(self, errand: object) -> None:
        self._put.append(errand)
        self._queue.put(errand)

    def is_done(self) -> bool:
        return all(errand is None or id(errand) in self._done for errand in self._put)


@pytest.mark.parametrize("stride", SOME)
@in_one_combo(CALLS)
def test_g12_two_interrupts_leave_nothing(
    two: Two, make: Callable[[], Call], stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one strikes what the first one has to be followed by."""
    handed_in = HandedIn(two.state.desk, monkeypatch)

    def strike(number: int, call: Callable[[], None]) -> object:
        steps = Steps(number, number + 1 + number % 13)
        struck = steps.run(call)
        # Where the second one struck the wait for that, what the call has done is undone a moment later.
        assert wait_until(handed_in.is_done, END_S)
        return steps.where if struck else None

    assert strike_all(two, make(), stride, strike) > 20


# One that strikes a callback of a weak reference, as of ``threading``, is lost.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("stride", SOME)
@in_one_combo(CALLS)
def test_g12_two_signals_at_once_leave_nothing(
    two: Two, make: Callable[[], Call], stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one strikes as soon as the version looks for signals: 3.10 does before the first step of a handler."""
    handed_in = HandedIn(two.state.desk, monkeypatch)

    def strike(number: int, call: Callable[[], None]) -> object:
        steps = Steps(number, strike=two_signals)
        # The second one may strike as late as in the first ``suppress``.
        with contextlib.suppress(KeyboardInterrupt), contextlib.suppress(KeyboardInterrupt):
            steps.run(call)
        assert wait_until(handed_in.is_done, END_S)
        return steps.where or None

    with signals_elsewhere():
        assert strike_all(two, make(), stride, strike) > 20


def interrupt_main() -> None:
    """A signal that comes just before a thread sleeps does not wake it: to be repeated."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


@pytest.mark.parametrize("stride", SOME_OF_THE_ENGINE)
@in_one_combo([c for c in CALLS if c not in IN_THE_CALLER])
def test_g12_an_interrupt_while_the_engine_is_at_any_step_leaves_nothing(
    two: Two, make: Callable[[], Call], stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    do = Errand.do
    armed: list[int] = []

    def on_signal(*_: object) -> None:
        if armed:
            armed.pop()
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, on_signal)

    def strike(number: int, call: Callable[[], None]) -> object:
        struck: list[object] = []

        def done_in_steps(errand: Errand[Any], *, is_alone: bool = False) -> None:
            monkeypatch.setattr(Errand, "do", do)  # the first one alone

            def interrupt() -> None:
                if not errand._answered.is_open:
                    struck.append(steps.where)
                    armed.append(1)
                    assert wait_until(lambda: errand.dropped or interrupt_main(), END_S)

            steps = Steps(number, strike=interrupt)
            steps.run(lambda: do(errand, is_alone=is_alone))

        monkeypatch.setattr(Errand, "do", done_in_steps)
        with contextlib.suppress(KeyboardInterrupt):
            call()
        return struck[0] if struck else None

    try:
        assert strike_all(two, make(), stride, strike) > 1
    finally:
        signal.signal(signal.SIGINT, before)


def test_g12_an_interrupt_while_movers_are_started_loses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that nobody has noted would never be joined."""
    started: list[threading.Thread] = []

    def struck(target: Callable[[], None], name: str) -> threading.Thread:
        thread = start_thread(target, name)
        started.append(thread)
        if len(started) == 1:
            signal.raise_signal(signal.SIGALRM)
        return thread

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with Engines("B", "local") as engines:
            owner, reader = engines.make(1), engines.make(2, TransferThreads="3")
            assert engines.link(reader, 1, owner) == SUCCESS
            engines.register(owner, np.full((1, 2, 8 << 20), 7, np.uint8), 0)
            destination = np.full((1, 2, 8 << 20), FILL, np.uint8)
            cache = engines.register(reader, destination)
            monkeypatch.setattr(movers, "start_thread", struck)
            with pytest.raises(KeyboardInterrupt):
                reader.cache_manager.pull_blocks(BlocksCacheKey(1, 0), cache, [0, 1], [0, 1])
            reader.cache_manager.pull_blocks(BlocksCacheKey(1, 0), cache, [0, 1], [0, 1])
            assert (destination == 7).all()
            assert reader._engine._movers._threads == started and len(started) == 2  # type: ignore[union-attr]
        assert not any(thread.is_alive() for thread in started)
    finally:
        signal.signal(signal.SIGALRM, before)
