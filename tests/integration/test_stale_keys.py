"""Mode B: a reader whose copy of the table is behind notices that a key was taken over or removed.

The cache that the key used to find is still registered, so its own word does not tell; the key's does.
Announcements are held back here, which is what a busy control thread does for milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from llm_datadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheNotExistError,
    DataType,
    LLMClusterInfo,
    LLMDataDist,
    LLMRole,
)
from llm_datadist._engine.handler import Handler

DESC = CacheDesc(1, [4, 64], DataType.DT_UINT8)
HALF = CacheDesc(1, [8, 32], DataType.DT_UINT8)  # the same memory in blocks of another size


class Two:
    """An owner and a reader in one process, with memory of their own."""

    def __init__(self, backend: str) -> None:
        self.owner, self.reader = self._engine(1, backend, "127.0.0.1:0"), self._engine(2, backend)
        peer = LLMClusterInfo()
        peer.remote_cluster_id = 1
        peer.append_local_ip_info("127.0.0.1", 0)
        address = self.owner.listen_address
        assert address is not None
        peer.append_remote_ip_info(*address)
        self.reader.link_clusters([peer], 3000)
        self.memory = np.full((4, 64), 0xA5, np.uint8)
        self.held: list[np.ndarray[Any, Any]] = []
        manager = self.reader.cache_manager
        self.cache = manager.register_blocks_cache(DESC, [self.memory.ctypes.data])
        self.half = manager.register_blocks_cache(HALF, [self.memory.ctypes.data])

    def _engine(self, cluster_id: int, backend: str, listen: str | None = None) -> LLMDataDist:
        engine = LLMDataDist(LLMRole.MIX, cluster_id)
        options = {
            "llm.EnableCacheManager": "1",
            "llm.EnableRemoteCacheAccessible": "1",
            "llm.AllowMultipleInstances": "1",
            "llm.TransferBackend": backend,
        }
        engine.init(options | ({"llm.listenIpInfo": listen} if listen else {}))
        return engine

    def blocks(self, value: int, desc: CacheDesc = DESC) -> Cache:
        """A blocks cache of the owner under BlocksCacheKey(1, 0), every byte ``value``."""
        self.held.append(np.full((4, 64), value, np.uint8))
        manager = self.owner.cache_manager
        return manager.register_blocks_cache(desc, [self.held[-1].ctypes.data], BlocksCacheKey(1, 0))

    def slots(self, value: int) -> Cache:
        """A cache of the owner whose slots 0 and 1 have the request ids 10 and 11."""
        self.held.append(np.full((4, 64), value, np.uint8))
        keys = [CacheKey(1, 10), CacheKey(1, 11)]
        return self.owner.cache_manager.register_cache(DESC, [self.held[-1].ctypes.data], keys)

    def pull(self, key: BlocksCacheKey | CacheKey) -> set[int]:
        """The values that block 0 of the reader holds afterwards."""
        src = [0] if isinstance(key, BlocksCacheKey) else []
        self.reader.cache_manager.pull_blocks(key, self.cache, src, [0])
        assert (self.memory[1:] == 0xA5).all()
        return set(self.memory[0].tolist())


@pytest.fixture(params=["local", "tcp"])
def two(request: pytest.FixtureRequest) -> Iterator[Two]:
    two = Two(request.param)
    yield two
    two.reader.finalize()
    two.owner.finalize()


def hold_back(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the reader's copy stays as it is; a check of the link has brought it up to date before."""
    two.reader.check_link_status(1)
    monkeypatch.setattr(Handler, "_announced", lambda *_: None)


@pytest.mark.rule("5.14")
def test_m5_a_key_taken_over_is_not_read_from_the_cache_that_had_it(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    two.blocks(1)
    hold_back(two, monkeypatch)
    assert two.pull(BlocksCacheKey(1, 0)) == {1}
    two.blocks(2)
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
    old = two.blocks(1)
    hold_back(two, monkeypatch)
    two.owner.cache_manager.unregister_cache(old.cache_id)
    two.blocks(2, HALF if half else DESC)
    into = two.half if half else two.cache
    two.reader.cache_manager.pull_blocks(BlocksCacheKey(1, 0), into, [1, 2], [2, 1])
    rows = two.memory.reshape(into.cache_desc.shape)
    assert (rows[1:3] == 2).all() and (rows[0] == 0xA5).all() and (rows[3:] == 0xA5).all()


@pytest.mark.parametrize("half", [False, True], ids=["size it had", "another size"])
@pytest.mark.rule("5.12")
def test_a_key_that_is_gone_does_not_exist_whatever_the_destination(
    two: Two, monkeypatch: pytest.MonkeyPatch, half: bool
) -> None:
    old = two.blocks(1)
    hold_back(two, monkeypatch)
    two.owner.cache_manager.unregister_cache(old.cache_id)
    with pytest.raises(CacheNotExistError):
        two.reader.cache_manager.pull_blocks(BlocksCacheKey(1, 0), two.half if half else two.cache, [1], [1])
    assert (two.memory == 0xA5).all()
