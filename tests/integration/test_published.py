"""Row G16: an offer names a cache that was published on its link; when that is said, and when it is taken back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from llm_datadist import BlocksCacheKey, Cache, MemInfo, Memtype
from llm_datadist._engine.handler import Handler
from llm_datadist._engine.offering import Offering
from llm_datadist._engine.state import peer_of
from llm_datadist._wire.messages import Publish
from tests.support.engines import Engines, Layers
from tests.support.pair import SUCCESS
from tests.support.world import wait_until

BACKENDS = ["local", "tcp", "shm"]


class Two(Engines):
    """One that offers, and one that reads."""

    def __init__(self, mode: str, backend: str) -> None:
        super().__init__(mode, backend)
        self.owner, self.reader = self.make(1), self.make(2)
        assert self.link(self.owner, 2, self.reader) == SUCCESS
        self.source, self.memory = self.blocks(self.owner, 7)
        _, self.into = self.blocks(self.reader, model_id=1)

    def push(self, source: Cache) -> None:
        if self.mode == "B":
            self.owner.cache_manager.push_blocks(BlocksCacheKey(2, 1), source, [1], [3])
        else:
            task = self.push_layers(self.owner, source, (2, 1, self.into), Layers())
            assert task.get_results(5000) == [SUCCESS]
        assert (self.into[:, 3] == 7).all()
        self.into[:] = 0

    def published(self) -> int:
        """How many caches the owner takes for published, and the reader has."""
        (mine,), (theirs,) = (e._engine._state.by_token.values() for e in (self.owner, self.reader))  # type: ignore[union-attr]
        count = len(peer_of(mine).published._kept)
        assert wait_until(lambda: len(peer_of(theirs).sources._kept) == count)
        return count


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The caches published, in order."""
    said: list[int] = []
    on_message: Any = Handler.on_message

    def note(handler: Handler, link: Any, frame: Any) -> None:
        if isinstance(frame.message, Publish):
            said.append(frame.message.entry.cache_id)
        on_message(handler, link, frame)

    monkeypatch.setattr(Handler, "on_message", note)
    return said


@pytest.fixture(params=[(mode, backend) for mode in "AB" for backend in BACKENDS], ids="-".join)
def two(request: pytest.FixtureRequest) -> Iterator[Two]:
    with Two(*request.param) as two:
        yield two


def test_g16_a_cache_is_published_once_and_until_it_is_unregistered(two: Two, said: list[int]) -> None:
    for _ in range(3):
        two.push(two.source)
    assert said == [two.source.cache_id] and two.published() == 1
    other = two.register(two.owner, two.memory)
    two.push(other)
    two.push(two.source)
    assert said == [two.source.cache_id, other.cache_id] and two.published() == 2
    two.owner.cache_manager.unregister_cache(two.source.cache_id)
    assert two.published() == 1
    two.push(other)
    two.owner.cache_manager.unregister_cache(other.cache_id)
    assert two.published() == 0 and len(said) == 2


def test_g16_memory_that_was_mapped_anew_is_published_anew(two: Two, said: list[int]) -> None:
    two.push(two.source)
    start = int(two.memory.ctypes.data)
    two.owner.cache_manager.remap_registered_memory([MemInfo(Memtype.MEM_TYPE_DEVICE, start, 64)])
    two.push(two.source)
    assert said == [two.source.cache_id] * 2 and two.published() == 1


def test_g16_a_cache_that_is_unregistered_before_its_offer_leaves_nothing(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The offer still goes out, and unregister waits for it; what it published goes with it."""
    post: Any = Offering._post
    state: Any = two.owner._engine._state  # type: ignore[union-attr]

    def unregister_first(offering: Offering) -> None:
        with state.lock:
            two.owner._engine._catalog.take_out(two.source.cache_id)  # type: ignore[union-attr]
        post(offering)

    monkeypatch.setattr(Offering, "_post", unregister_first)
    two.push(two.source)
    assert two.published() == 0
