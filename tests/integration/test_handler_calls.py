"""What a signal handler calls in the middle of another call of its thread, which may hold a lock that the engine needs.

Looking works in any case; what the engine has to wait for is refused there, and works everywhere else.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from llm_datadist import (
    BlocksCacheKey,
    CacheDesc,
    DataType,
    LinkBusyError,
    LLMException,
    LLMStatusCode,
    Placement,
)
from llm_datadist._waiting import is_within
from tests.support.engines import unlink
from tests.support.held import run_watched, watched
from tests.support.interrupted import DESC, END_S, INTERRUPTED, KEY, SUCCESS, Pull, Two
from tests.support.pair import COMBOS, Combo
from tests.support.steps import Steps
from tests.support.within import REFUSED
from tests.support.world import wait_until

SOME = [
    pytest.param(31, id="some"),
    pytest.param(1, id="all", marks=pytest.mark.slow),
]  # a prime: as of others
FROM = BlocksCacheKey(1, 0)
MODELS = itertools.count(100)  # another one each time
# What calls of a handler end with where the link comes or goes, or the call that it has interrupted has not ended.
ELSE = {LLMStatusCode.LLM_NOT_YET_LINK, LLMStatusCode.LLM_LINK_FAILED, LLMStatusCode.LLM_TIMEOUT}


class TwoAndTask(Two):
    """With a task that has ended, and what has come of notifications."""

    def __init__(self, combo: Combo) -> None:
        super().__init__(combo)
        self.taken: list[object] = []
        self.task = self.manager.pull_blocks_async(FROM, self.cache, [1], [1])
        self.task.synchronize()


Do = Callable[[TwoAndTask], object]


def register(two: TwoAndTask) -> None:
    two.manager.unregister_cache(two.register(two.reader, two.spare, next(MODELS)).cache_id)


def allocate(two: TwoAndTask) -> None:
    two.manager.deallocate_cache(two.manager.allocate_cache(DESC))
    two.manager.remove_cache_key(KEY)


def link(two: TwoAndTask) -> None:
    assert two.link(two.reader, 1, two.owner) in (SUCCESS, LLMStatusCode.LLM_ALREADY_LINK)


def link_anew(two: TwoAndTask) -> None:
    unlink(two.reader, 1)
    link(two)


def pull(two: TwoAndTask) -> None:
    two.manager.pull_blocks(FROM, two.cache, [1, 3], [1, 3])


def pull_one(two: TwoAndTask) -> None:
    two.manager.pull_blocks(FROM, two.cache, [1], [1])


def pull_async(two: TwoAndTask) -> None:
    code = two.manager.pull_blocks_async(FROM, two.cache, [1, 3], [1, 3]).synchronize()
    assert code == SUCCESS or code in ELSE


def push(two: TwoAndTask) -> None:
    if two.mode == "B":
        two.manager.push_blocks(FROM, two.cache, [0], [0])


def copy(two: TwoAndTask) -> None:
    two.manager.copy_blocks(two.cache, {0: [2]})


def send(two: TwoAndTask) -> None:
    two.reader.send_notify(1, "name", b"")


def take(two: TwoAndTask) -> None:
    two.owner.send_notify(2, "name", b"")
    get(two)


def get(two: TwoAndTask) -> None:
    two.taken.extend(two.reader.get_notifies())  # by whichever of the two calls


LOOKING: dict[str, Do] = {
    "caches": lambda two: two.manager.caches(),
    "pool_info": lambda two: two.manager.pool_info(Placement.DEVICE),
    "links": lambda two: two.reader.links(),
    "get_notifies": get,
    "link_error": lambda two: two.reader.link_error(1),
    "get_results": lambda two: two.task.get_results(),
    "done callback": lambda two: two.task.add_done_callback(lambda task: task.synchronize()),
}  # fmt: skip
CHANGING: dict[str, Do] = {
    "register": register, "allocate": allocate, "pull": pull, "pull_async": pull_async, "push": push, "copy": copy,
    "send_notify": send, "check_link_status": lambda two: two.reader.check_link_status(1), "link": link,
}  # fmt: skip
OUTER: dict[str, Do] = {**CHANGING, **LOOKING, "link": link_anew, "pull_one": pull_one, "take": take}


@pytest.fixture(params=INTERRUPTED, ids=str)
def two(request: pytest.FixtureRequest) -> Iterator[TwoAndTask]:
    with TwoAndTask(request.param) as two:
        yield two


class Handler:
    """Makes all calls. Raises nothing: what is wrong is in ``wrong``."""

    def __init__(self, two: TwoAndTask, outer: str) -> None:
        self._two = two
        self.refused = 0
        self.wrong: list[object] = []
        self._links = outer == "link"

    def __call__(self) -> None:
        is_within_now = is_within()
        for name, do in LOOKING.items():
            self._make(name, do, refused=False)
        for name, do in CHANGING.items():
            if not (self._links and name == "link"):
                self._make(name, do, refused=is_within_now)
        self._make("pull_one", pull_one, refused=None)  # over some ways no lock is taken

    def _make(self, name: str, do: Do, *, refused: bool | None) -> None:
        try:
            do(self._two)
            was_refused = False
        except LLMException as exc:
            was_refused = isinstance(exc, LinkBusyError) and REFUSED in str(exc)
            if not was_refused and not (self._links and exc.status_code in ELSE):
                self.wrong.append((name, exc))
        self.refused += was_refused
        if refused is not None and refused != was_refused and not (name == "push" and self._two.mode == "A"):
            self.wrong.append((name, "refused" if was_refused else "not refused"))


@pytest.mark.parametrize("stride", SOME)
@pytest.mark.parametrize("outer", OUTER)
def test_g12_a_handler_may_call_anything_at_any_step(two: TwoAndTask, outer: str, stride: int) -> None:
    if outer == "push" and two.mode == "A":
        pytest.skip("pushes need mode B")
    refused = 0
    for number in itertools.count(1, stride):
        two.relink()
        handler = Handler(two, outer)
        steps = Steps(number, strike=handler)
        steps.run(lambda: OUTER[outer](two))
        assert not handler.wrong, (steps.where, handler.wrong)
        two.check(steps.where)
        two.owner.get_notifies()
        refused += handler.refused
        if not steps.where:
            break
    assert refused or two.mode != "A" or outer != "pull"
    assert len(two.taken) == (number - 1) // stride + 1 if outer == "take" else not two.taken
    two.relink()
    for do in (*LOOKING.values(), *CHANGING.values()):
        do(two)
    Pull().done(two, Pull().make(two))


def within(two: TwoAndTask, do: Callable[[], object]) -> None:
    """Does it in a handler that interrupts a pull which holds the engine's lock."""
    done: list[bool] = []

    def strike() -> None:
        if is_within() and not done:
            done.append(True)
            with pytest.raises(LinkBusyError, match=REFUSED):
                do()

    for number in itertools.count(1):
        with contextlib.suppress(LLMException):
            Steps(number, strike=strike).run(lambda: pull(two))
        if done:
            return


def test_g12_a_finalize_that_cannot_wait_comes_when_the_handler_has_returned(two: TwoAndTask) -> None:
    within(two, two.reader.finalize)
    assert wait_until(lambda: two.reader._engine is None, END_S)


def test_g12_so_does_a_drain(two: TwoAndTask) -> None:
    within(two, lambda: two.reader.drain(5000))
    assert wait_until(lambda: two.state.draining, END_S)
    two.reader.drain(5000)
    with pytest.raises(LinkBusyError, match="is draining"):
        pull(two)


@pytest.mark.parametrize("combo", COMBOS, ids=str)
def test_g12_callers_look_for_signals_within_guards_alone(combo: Combo) -> None:
    """Whatever other lock a handler finds taken by its own thread, it would wait for in vain."""
    with watched() as watch, TwoAndTask(combo) as two:
        for name, do in OUTER.items():
            run_watched(watch, lambda: do(two))  # noqa: B023
            assert not watch.seen, name
        large = np.zeros((2, 3 << 20), "u1")  # movers help
        desc = CacheDesc(1, list(large.shape), DataType.DT_UINT8)
        cache = two.manager.register_blocks_cache(desc, [large.ctypes.data], BlocksCacheKey(2, next(MODELS)))
        run_watched(watch, lambda: two.manager.copy_blocks(cache, {0: [1]}))
        assert not watch.seen
