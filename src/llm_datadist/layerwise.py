"""What a layer-wise push takes from its caller: who says that a layer is computed, and where it goes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from llm_datadist.checks import check_isinstance, check_list_uint64, check_uint32, check_uint64
from llm_datadist.keys import BlocksCacheKey, CacheKeyByIdAndIndex


class LayerSynchronizer(ABC):
    """Says when a layer of the source cache is complete."""

    @abstractmethod
    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        """Waits until the layer is computed; called once per layer, ascending, from a thread of the library.

        Args:
            layer_index: The layer of the source.
            timeout_in_millis: How long to wait at most; None: as long as it takes.

        Returns:
            Whether the layer may be sent. False ends the task with LLM_PARAM_INVALID.
        """


class TransferConfig:
    """Mode A: push layers to raw addresses of a peer.

    Args:
        dst_cluster_id: The peer, uint64.
        dst_addrs: Addresses there, 2 per layer of the range, relative to its start.
        src_layer_range: Layers to send; None: all.
        src_batch_index: Slot of the source, uint32.
    """

    def __init__(
        self,
        dst_cluster_id: int,
        dst_addrs: Sequence[int],
        src_layer_range: range | None = None,
        src_batch_index: int = 0,
    ) -> None:
        self.dst_cluster_id = dst_cluster_id
        self.dst_addrs = dst_addrs
        self.src_layer_range = src_layer_range
        self.src_batch_index = src_batch_index

    @property
    def dst_cluster_id(self) -> int:
        """The peer."""
        return self._dst_cluster_id

    @dst_cluster_id.setter
    def dst_cluster_id(self, value: int) -> None:
        self._dst_cluster_id = check_uint64("dst_cluster_id", value)

    @property
    def dst_addrs(self) -> Sequence[int]:
        """Addresses at the peer; a list, checked again when the transfer starts."""
        return self._dst_addrs

    @dst_addrs.setter
    def dst_addrs(self, value: Sequence[int]) -> None:
        self._dst_addrs = list(check_list_uint64("dst_addrs", value))

    @property
    def src_layer_range(self) -> range | None:
        """Layers to send; None: all."""
        return self._src_layer_range

    @src_layer_range.setter
    def src_layer_range(self, value: range | None) -> None:
        self._src_layer_range: range | None = check_isinstance("src_layer_range", value, range, True)

    @property
    def src_batch_index(self) -> int:
        """Slot of the source."""
        return self._src_batch_index

    @src_batch_index.setter
    def src_batch_index(self, value: int) -> None:
        self._src_batch_index = check_uint32("src_batch_index", value)

    def __repr__(self) -> str:
        return (
            f"TransferConfig(dst_cluster_id={self._dst_cluster_id}, "
            f"dst_addrs=<{len(self._dst_addrs)} addresses>, "
            f"src_layer_range={self._src_layer_range}, src_batch_index={self._src_batch_index})"
        )


class TransferWithCacheKeyConfig:
    """Mode B: push layers to a cache of a peer that is found by key.

    Args:
        cache_key: The peer and its cache.
        src_layer_range: Layers to send.
        dst_layer_range: Layers to fill, of the same number; they correspond by position.
        src_batch_index: Slot of the source, uint32.
    """

    def __init__(
        self,
        cache_key: BlocksCacheKey | CacheKeyByIdAndIndex,
        src_layer_range: range,
        dst_layer_range: range,
        src_batch_index: int = 0,
    ) -> None:
        self.cache_key = cache_key
        self.src_layer_range = src_layer_range
        self.dst_layer_range = dst_layer_range
        self.src_batch_index = src_batch_index

    @property
    def cache_key(self) -> BlocksCacheKey | CacheKeyByIdAndIndex:
        """The peer and its cache."""
        return self._cache_key

    @cache_key.setter
    def cache_key(self, value: BlocksCacheKey | CacheKeyByIdAndIndex) -> None:
        kinds = (BlocksCacheKey, CacheKeyByIdAndIndex)
        self._cache_key: BlocksCacheKey | CacheKeyByIdAndIndex = check_isinstance("cache_key", value, kinds)

    @property
    def src_layer_range(self) -> range:
        """Layers to send."""
        return self._src_layer_range

    @src_layer_range.setter
    def src_layer_range(self, value: range) -> None:
        self._src_layer_range: range = check_isinstance("src_layer_range", value, range)

    @property
    def dst_layer_range(self) -> range:
        """Layers to fill."""
        return self._dst_layer_range

    @dst_layer_range.setter
    def dst_layer_range(self, value: range) -> None:
        self._dst_layer_range: range = check_isinstance("dst_layer_range", value, range)

    @property
    def src_batch_index(self) -> int:
        """Slot of the source."""
        return self._src_batch_index

    @src_batch_index.setter
    def src_batch_index(self, value: int) -> None:
        self._src_batch_index = check_uint32("src_batch_index", value)

    def __repr__(self) -> str:
        return (
            f"TransferWithCacheKeyConfig({self._cache_key}, src_layer_range={self._src_layer_range}, "
            f"dst_layer_range={self._dst_layer_range}, src_batch_index={self._src_batch_index})"
        )
