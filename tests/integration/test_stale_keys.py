"""Mode B: a reader whose copy of the table is behind notices that a key was taken over or removed.

The cache that the key used to find is still registered, so its own word does not tell; the key's does.
Announcements are held back here, which is what a busy control thread does for milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from llm_datadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheNotExistError,
    DataType,
    LLMStatusCode,
)
from llm_datadist._engine.handler import Handler
from tests.support.engines import Engines

DESC = CacheDesc(1, [4, 64], DataType.DT_UINT8)
HALF = CacheDesc(1, [8, 32], DataType.DT_UINT8)  # the same memory in blocks of another size


class Two(Engines):
    """An owner and a reader in one process, with memory of their own."""

    def __init__(self, backend: str) -> None:
        super().__init__("B", backend)
        self.owner, self.reader = self.make(1), self.make(2)
        assert self.link(self.reader, 1, self.owner) == LLMStatusCode.LLM_SUCCESS
        self.memory = np.full((4, 64), 0xA5, np.uint8)
        manager = self.reader.cache_manager
        self.cache = manager.register_blocks_cache(DESC, [self.memory.ctypes.data])
        self.half = manager.register_blocks_cache(HALF, [self.memory.ctypes.data])

    def owned(self, value: int, desc: CacheDesc = DESC) -> Cache:
        """A blocks cache of the owner under BlocksCacheKey(1, 0), every byte ``value``."""
        address = self._filled(value)
        return self.owner.cache_manager.register_blocks_cache(desc, [address], BlocksCacheKey(1, 0))

    def slots(self, value: int) -> Cache:
        """A cache of the owner whose slots 0 and 1 have the request ids 10 and 11."""
        keys = [CacheKey(1, 10), CacheKey(1, 11)]
        return self.owner.cache_manager.register_cache(DESC, [self._filled(value)], keys)

    def _filled(self, value: int) -> int:
        self._held.append(self.space(self.owner, (4, 64), value))
        return int(self._held[-1].ctypes.data)

    def pull(self, key: BlocksCacheKey | CacheKey) -> set[int]:
        """The values that block 0 of the reader holds afterwards."""
        src = [0] if isinstance(key, BlocksCacheKey) else []
        self.reader.cache_manager.pull_blocks(key, self.cache, src, [0])
        assert (self.memory[1:] == 0xA5).all()
        return set(self.memory[0].tolist())


@pytest.fixture(params=["local", "tcp", "shm"])
def two(request: pytest.FixtureRequest) -> Iterator[Two]:
    with Two(request.param) as two:
        yield two


def hold_back(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the reader's copy stays as it is; a check of the link has brought it up to date before."""
    two.reader.check_link_status(1)
    monkeypatch.setattr(Handler, "_announced", lambda *_: None)


@pytest.mark.rule("5.14")
def test_m5_a_key_taken_over_is_not_read_from_the_cache_that_had_it(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    two.owned(1)
    hold_back(two, monkeypatch)
    assert two.pull(BlocksCacheKey(1, 0)) == {1}
    two.owned(2)
    assert two.pull(BlocksCacheKey(1, 0)) == {2}


def test_a_key_removed_is_not_read_any_more_and_its_neighbour_is(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    two.slots(1)
    hold_back(two, monkeypatch)
    assert two.pull(CacheKey(1, 10)) == {1}
    two.owner.cache_manager.remove_cache_key(CacheKey(1, 10))
    two.memory[:] = 0xA5
    with pytest.raises(CacheNotExistError):
        two.pull(CacheKey(1, 10))
    assert (two.memory == 0xA5).all()
    assert two.pull(CacheKey(1, 11)) == {1}


@pytest.mark.parametrize("half", [False, True], ids=["same size", "another size"])
@pytest.mark.rule("5.14")
def test_a_key_registered_again_is_read_in_its_new_block_size(
    two: Two, monkeypatch: pytest.MonkeyPatch, half: bool
) -> None:
    old = two.owned(1)
    hold_back(two, monkeypatch)
    two.owner.cache_manager.unregister_cache(old.cache_id)
    two.owned(2, HALF if half else DESC)
    into = two.half if half else two.cache
    two.reader.cache_manager.pull_blocks(BlocksCacheKey(1, 0), into, [1, 2], [2, 1])
    rows = two.memory.reshape(into.cache_desc.shape)
    assert (rows[1:3] == 2).all() and (rows[0] == 0xA5).all() and (rows[3:] == 0xA5).all()


@pytest.mark.parametrize("half", [False, True], ids=["size it had", "another size"])
@pytest.mark.rule("5.12")
def test_a_key_that_is_gone_does_not_exist_whatever_the_destination(
    two: Two, monkeypatch: pytest.MonkeyPatch, half: bool
) -> None:
    old = two.owned(1)
    hold_back(two, monkeypatch)
    two.owner.cache_manager.unregister_cache(old.cache_id)
    with pytest.raises(CacheNotExistError):
        two.reader.cache_manager.pull_blocks(BlocksCacheKey(1, 0), two.half if half else two.cache, [1], [1])
    assert (two.memory == 0xA5).all()
