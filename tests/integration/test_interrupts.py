"""An interrupt anywhere in a call leaves nothing in flight: unlink, unregister and finalize do not wait for it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any

import pytest

from llm_datadist import BlocksCacheKey
from tests.support import actors
from tests.support.engines import Engines
from tests.support.pair import COMBOS, SUCCESS, Combo

WHERE = [
    ("flights.py", "begin", "call"),
    ("flights.py", "begin", "return"),
    ("flights.py", "end", "call"),
    ("flights.py", "end", "return"),
    ("flights.py", "fly", "call"),
    ("flights.py", "over", "return"),
]


class Two(Engines):
    """A reader (2) and an owner (1), each with a cache of the other's form."""

    def __init__(self, combo: Combo) -> None:
        super().__init__(combo.mode, combo.backend)
        self.owner, self.reader = self.make(1), self.make(2)
        assert self.link(self.reader, 1, self.owner) == SUCCESS
        self.blocks(self.owner, 7, model_id=0)
        self.cache, _ = self.blocks(self.reader, model_id=0)
        self.manager = self.reader.cache_manager

    def pull(self) -> None:
        self.manager.pull_blocks(BlocksCacheKey(1, 0), self.cache, [1, 3], [1, 3])

    def pull_async(self) -> None:
        self.manager.pull_blocks_async(BlocksCacheKey(1, 0), self.cache, [1], [1]).synchronize(5000)

    def push(self) -> None:
        self.manager.push_blocks(BlocksCacheKey(1, 0), self.cache, [1, 3], [1, 3])

    def copy(self) -> None:
        self.manager.copy_blocks(self.cache, {0: [2]})

    def notify(self) -> None:
        self.reader.send_notify(1, "name", b"text")


CALLS: list[Callable[[Two], None]] = [Two.pull, Two.pull_async, Two.push, Two.copy, Two.notify]


@pytest.fixture(params=[c for c in COMBOS if str(c) in ("A-local", "B-tcp", "B-shm")], ids=str)
def two(request: pytest.FixtureRequest) -> Iterator[Two]:
    with Two(request.param) as two:
        yield two


def interrupted(call: Callable[[], None], file: str, name: str, event: str) -> None:
    """Runs it, with an interrupt the first time that this thread calls that function, or returns from it."""

    def trace(frame: FrameType, what: str, _: Any) -> Any:
        if frame.f_code.co_name != name or not frame.f_code.co_filename.endswith(file):
            return None
        if what == event:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("where", WHERE, ids=lambda where: f"{where[1]}-{where[2]}")
def test_nothing_is_left_in_flight(two: Two, where: tuple[str, str, str]) -> None:
    state = two.reader._engine._state  # type: ignore[union-attr]
    for call in CALLS:
        if two.mode == "A" and call is Two.push:
            continue
        with contextlib.suppress(KeyboardInterrupt):
            interrupted(partial(call, two), *where)
        with state.lock:
            # A call in the background may still be ending by itself.
            ended = state.condition.wait_for(lambda: not state.flights.where(lambda f: True), 5)
        assert ended, f"{call.__name__} is in flight for ever"
        call(two)
    assert two.reader.unlink_clusters([actors.cluster(1)], 2000)[0] == SUCCESS
    two.manager.unregister_cache(two.cache.cache_id)
