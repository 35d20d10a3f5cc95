"""The transfers of a CacheManager: pulls, pushes, and their variants that go on in the background.

Every call checks the state first, then types and ranges, and hands a frozen request to the engine, which
checks everything that needs to know a cache or a peer. Threads: any.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic
from typing import TYPE_CHECKING

from llm_datadist import transfer_requests as requests
from llm_datadist._core.indices import BlockList
from llm_datadist._engine.errands import Errand, handed_in
from llm_datadist.caches import Cache
from llm_datadist.keys import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex
from llm_datadist.layerwise import LayerSynchronizer, TransferConfig, TransferWithCacheKeyConfig
from llm_datadist.tasks import CacheTask
from llm_datadist.transfer_requests import layers_of

if TYPE_CHECKING:
    from llm_datadist._engine.engine import Engine

_PER_LAYER = 2  # the default of tensor_num_per_layer; told by identity, which says int as well


class Transfers:
    """The part of CacheManager that moves caches."""

    def __init__(self, live: Callable[[], Engine]) -> None:
        self._live = live

    # ---- pulls -------------------------------------------------------------------------------------

    def pull_cache(
        self,
        cache_key: CacheKey | CacheKeyByIdAndIndex,
        cache: Cache,
        batch_index: int = 0,
        size: int = -1,
        *,
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        tensor_num_per_layer: int = 2,
        notify: tuple[str, bytes] | None = None,
    ) -> None:
        """Reads bytes [0, size) of a peer's slot into slot ``batch_index`` of ``cache``.

        Args:
            cache_key: The peer's slot; a CacheKey in mode A only.
            cache: Not a blocks cache.
            batch_index: Slot of ``cache``, uint32.
            size: Bytes per tensor; -1: the stride of ``cache``.
            src_layer_range: Layers at the peer; None: all.
            dst_layer_range: Layers of ``cache``; None: all.
            tensor_num_per_layer: Tensors of one layer, uint32.
            notify: (name, message), which the peer gets once the data is complete; 64 KiB each at most.

        Raises:
            TypeError: A wrong type, or a CacheKey in mode B.
            ValueError: An integer outside its range.
            LLMException: LLM_PARAM_INVALID, LLM_KV_CACHE_NOT_EXIST, LLM_NOT_YET_LINK, LLM_LINK_FAILED,
                LLM_WAIT_PROCESS_TIMEOUT, LLM_ENGINE_FINALIZED; LLM_OUT_OF_MEMORY: the data is complete,
                but the peer's queue of notifications is full.
        """
        engine, started = self._live(), monotonic()
        layers = layers_of(src_layer_range, dst_layer_range, tensor_num_per_layer)
        request = requests.pull_cache_request(engine, cache_key, cache, batch_index, size, layers, notify)
        engine.pull(request, started)

    def pull_blocks(
        self,
        src_cache_key: BlocksCacheKey | CacheKey | CacheKeyByIdAndIndex,
        dst_cache: Cache,
        src_blocks: BlockList = (),
        dst_blocks: BlockList = (),
        *,
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        tensor_num_per_layer: int = 2,
        notify: tuple[str, bytes] | None = None,
    ) -> None:
        """Reads a peer's blocks, or a peer's slot in pieces, into blocks of ``dst_cache``.

        Args:
            src_cache_key: A BlocksCacheKey for blocks, any other key for a slot.
            dst_cache: A blocks cache.
            src_blocks: Blocks at the peer (list, tuple or NumPy integer array); empty for a slot.
            dst_blocks: Blocks to fill, without repetition.
            src_layer_range: Layers at the peer; None: all.
            dst_layer_range: Layers of ``dst_cache``; None: all.
            tensor_num_per_layer: Tensors of one layer, uint32.
            notify: (name, message), which the peer gets once the data is complete; 64 KiB each at most.

        Raises:
            TypeError: A wrong type.
            ValueError: An integer outside its range.
            LLMException: See :meth:`pull_cache`.
        """
        engine, started = self._live(), monotonic()
        usual = src_layer_range is None and dst_layer_range is None and tensor_num_per_layer is _PER_LAYER
        if (
            usual
            and notify is None
            and engine.pull_again(src_cache_key, dst_cache, src_blocks, dst_blocks, started)
        ):
            return
        layers = layers_of(src_layer_range, dst_layer_range, tensor_num_per_layer)
        request = requests.pull_blocks_request(
            src_cache_key, dst_cache, src_blocks, dst_blocks, layers, notify
        )
        engine.pull(request, started)

    # ---- pushes ------------------------------------------------------------------------------------

    @handed_in
    def push_cache(
        self,
        dst_cache_key: CacheKeyByIdAndIndex,
        src_cache: Cache,
        src_batch_index: int = 0,
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        size: int = -1,
        tensor_num_per_layer: int = 2,
        *,
        notify: tuple[str, bytes] | None = None,
    ) -> Errand[None]:
        """Has a peer read slot ``src_batch_index`` of ``src_cache`` into a slot of its own. Mode B only.

        Args:
            dst_cache_key: The peer's slot.
            src_cache: Not a blocks cache.
            src_batch_index: Slot of ``src_cache``, uint32.
            src_layer_range: Layers of ``src_cache``; None: all.
            dst_layer_range: Layers at the peer; None: all.
            size: -1, a whole slot.
            tensor_num_per_layer: Tensors of one layer, uint32.
            notify: (name, message), which the peer gets once the data is complete; 64 KiB each at most.

        Raises:
            TypeError: A wrong type.
            ValueError: An integer outside its range.
            LLMException: LLM_PARAM_INVALID, LLM_KV_CACHE_NOT_EXIST, LLM_NOT_YET_LINK, LLM_LINK_FAILED,
                LLM_TIMEOUT, LLM_ENGINE_FINALIZED; LLM_OUT_OF_MEMORY: the data is complete, but the peer's
                queue of notifications is full.
        """
        engine = self._live()
        layers = layers_of(src_layer_range, dst_layer_range, tensor_num_per_layer)
        return engine.push(
            requests.push_cache_request(dst_cache_key, src_cache, src_batch_index, size, layers, notify)
        )

    @handed_in
    def push_blocks(
        self,
        dst_cache_key: BlocksCacheKey,
        src_cache: Cache,
        src_blocks: BlockList = (),
        dst_blocks: BlockList = (),
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        tensor_num_per_layer: int = 2,
        *,
        notify: tuple[str, bytes] | None = None,
    ) -> Errand[None]:
        """Has a peer read blocks of ``src_cache`` into blocks of its own. Mode B only.

        Args:
            dst_cache_key: The peer's blocks cache.
            src_cache: A blocks cache.
            src_blocks: Blocks of ``src_cache`` (list, tuple or NumPy integer array).
            dst_blocks: Blocks at the peer, as many, without repetition.
            src_layer_range: Layers of ``src_cache``; None: all.
            dst_layer_range: Layers at the peer; None: all.
            tensor_num_per_layer: Tensors of one layer, uint32.
            notify: (name, message), which the peer gets once the data is complete; 64 KiB each at most.

        Raises:
            TypeError: A wrong type.
            ValueError: An integer outside its range.
            LLMException: See :meth:`push_cache`.
        """
        engine = self._live()
        layers = layers_of(src_layer_range, dst_layer_range, tensor_num_per_layer)
        return engine.push(
            requests.push_blocks_request(dst_cache_key, src_cache, src_blocks, dst_blocks, layers, notify)
        )

    # ---- in the background -------------------------------------------------------------------------

    @handed_in
    def pull_cache_async(
        self,
        cache_key: CacheKey | CacheKeyByIdAndIndex,
        cache: Cache,
        batch_index: int = 0,
        size: int = -1,
        *,
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        tensor_num_per_layer: int = 2,
        notify: tuple[str, bytes] | None = None,
    ) -> Errand[CacheTask]:
        """:meth:`pull_cache` in the background.

        Returns:
            A task of one entry. Its time runs from this call.

        Raises:
            TypeError: As pull_cache.
            ValueError: As pull_cache.
            LLMException: A bad argument or an unknown ``cache``; everything about the peer is the task's result.
        """
        engine = self._live()
        layers = layers_of(src_layer_range, dst_layer_range, tensor_num_per_layer)
        return engine.pull_async(
            requests.pull_cache_request(engine, cache_key, cache, batch_index, size, layers, notify)
        )

    @handed_in
    def pull_blocks_async(
        self,
        src_cache_key: BlocksCacheKey | CacheKey | CacheKeyByIdAndIndex,
        dst_cache: Cache,
        src_blocks: BlockList = (),
        dst_blocks: BlockList = (),
        *,
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        tensor_num_per_layer: int = 2,
        notify: tuple[str, bytes] | None = None,
    ) -> Errand[CacheTask]:
        """:meth:`pull_blocks` in the background; returns and raises as :meth:`pull_cache_async`."""
        engine = self._live()
        layers = layers_of(src_layer_range, dst_layer_range, tensor_num_per_layer)
        return engine.pull_async(
            requests.pull_blocks_request(src_cache_key, dst_cache, src_blocks, dst_blocks, layers, notify)
        )

    @handed_in
    def push_cache_async(
        self,
        dst_cache_key: CacheKeyByIdAndIndex,
        src_cache: Cache,
        src_batch_index: int = 0,
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        size: int = -1,
        tensor_num_per_layer: int = 2,
        *,
        notify: tuple[str, bytes] | None = None,
    ) -> Errand[CacheTask]:
        """:meth:`push_cache` in the background; returns and raises as :meth:`pull_cache_async`."""
        engine = self._live()
        layers = layers_of(src_layer_range, dst_layer_range, tensor_num_per_layer)
        return engine.push_async(
            requests.push_cache_request(dst_cache_key, src_cache, src_batch_index, size, layers, notify)
        )

    @handed_in
    def push_blocks_async(
        self,
        dst_cache_key: BlocksCacheKey,
        src_cache: Cache,
        src_blocks: BlockList = (),
        dst_blocks: BlockList = (),
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        tensor_num_per_layer: int = 2,
        *,
        notify: tuple[str, bytes] | None = None,
    ) -> Errand[CacheTask]:
        """:meth:`push_blocks` in the background; returns and raises as :meth:`pull_cache_async`."""
        engine = self._live()
        layers = layers_of(src_layer_range, dst_layer_range, tensor_num_per_layer)
        return engine.push_async(
            requests.push_blocks_request(dst_cache_key, src_cache, src_blocks, dst_blocks, layers, notify)
        )

    @handed_in
    def transfer_cache_async(
        self,
        src_cache: Cache,
        layer_synchronizer: LayerSynchronizer,
        transfer_configs: Sequence[TransferConfig] | Sequence[TransferWithCacheKeyConfig],
        src_block_indices: BlockList | None = None,
        dst_block_indices: BlockList | None = None,
        dst_block_memory_size: int | None = None,
    ) -> Errand[CacheTask]:
        """Pushes layers to peers in the background, each as soon as the synchronizer lets it go.

        Args:
            src_cache: Placement DEVICE, 2 tensors per layer.
            layer_synchronizer: Says when a layer is complete.
            transfer_configs: One per destination: TransferConfig in mode A, TransferWithCacheKeyConfig in B.
            src_block_indices: Blocks of ``src_cache``; None: a slot.
            dst_block_indices: Blocks at each destination; None: a slot.
            dst_block_memory_size: Bytes of a destination block, int64; see the contract of the two lists.

        Returns:
            The task: one result per config.

        Raises:
            TypeError: A wrong type; a config of the other mode.
            ValueError: An integer outside its range.
            LLMException: LLM_PARAM_INVALID, LLM_KV_CACHE_NOT_EXIST.
        """
        engine = self._live()
        return engine.push_layers(
            requests.push_layers_request(
                engine,
                src_cache,
                layer_synchronizer,
                transfer_configs,
                src_block_indices,
                dst_block_indices,
                dst_block_memory_size,
            )
        )
