"""Allocated caches: memory from a pool, and how long it lives.

An allocated cache lives until it is deallocated *and* no request or prefix key finds it any more; it
stays pullable meanwhile. A request key goes when every tensor of its slot has been pulled (managed mode)
or by ``remove_key``. Blocks caches go at once.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

from llm_datadist._core.layout import Layout
from llm_datadist._core.registry import KeyName, Record, key_name_of
from llm_datadist._engine.catalog import Catalog, flush
from llm_datadist._engine.errands import Call
from llm_datadist._engine.state import State
from llm_datadist._link.link import Link
from llm_datadist.caches import Cache, CacheDesc
from llm_datadist.enums import Placement
from llm_datadist.infos import PoolInfo
from llm_datadist.keys import BlocksCacheKey, CacheKey
from llm_datadist.status import ParamInvalidError


class Allocator:
    """Allocated caches of this engine."""

    def __init__(self, state: State, catalog: Catalog) -> None:
        self._state = state
        self._catalog = catalog

    def allocate(
        self,
        desc: CacheDesc,
        keys: Sequence[CacheKey] | Sequence[BlocksCacheKey],
        *,
        is_blocks: bool,
        call: Call,
    ) -> Cache:
        """A cache in the pool of the desc's placement, open to peers; all or nothing.

        Raises:
            ParamInvalidError: Shape or keys break a rule, or there is no such pool.
            OutOfMemoryError: The pool has no room now.
        """
        desc = copy.copy(desc)  # update_dim of the caller's must not reach it
        layout = Layout.of(desc)
        if layout.num_tensors < 1:
            raise ParamInvalidError("CacheDesc.num_tensors is 0; a cache needs at least one tensor")
        state = self._state
        with state.lock:
            state.check_open()
            names = state.registry.check_keys(keys, layout)
            addresses, allocation = state.pools.take(desc.placement, layout)

            def keep(cache_id: int) -> None:
                state.pools.keep(cache_id, allocation)
                state.regions.keep_pooled(cache_id, desc.placement)

            try:
                entered = self._catalog.enter(
                    desc, layout, addresses, names, is_blocks=is_blocks, remote_accessible=True, keep=keep
                )
            except BaseException:
                state.pools.give_back(allocation)
                raise
        return self._catalog.finish(entered, call)

    def deallocate(self, cache: Cache, *, is_blocks: bool, call: Call) -> None:
        """Gives a cache back; unknown or repeated: nothing.

        Raises:
            ParamInvalidError: The other kind of cache.
        """
        if cache.is_blocks_cache is not is_blocks:
            kind, other = (
                ("blocks cache", "deallocate_blocks_cache")
                if cache.is_blocks_cache
                else ("cache", "deallocate_cache")
            )
            raise ParamInvalidError(f"cache {cache.cache_id} is a {kind}; use {other}")
        state = self._state
        with state.lock:
            state.check_open()
            record = state.registry.get(cache.cache_id)
            if record is None or not cache.belongs_to(state.life) or not state.pools.has(cache.cache_id):
                return
            if not is_blocks and state.registry.names_of(record):
                state.pools.mark_unowned(cache.cache_id)
                return
        self._catalog.unregister(cache.cache_id, call)

    def pool_info(self, placement: Placement) -> PoolInfo:
        """What is free and in use in a pool.

        Raises:
            ParamInvalidError: There is no such pool.
        """
        with self._state.lock:
            self._state.check_open()
            return self._state.pools.info(placement)

    def remove_key(self, key: CacheKey) -> None:
        """Takes a key away; an unknown one is fine.

        Raises:
            ParamInvalidError: It has both a req_id and a prefix_id.
        """
        name = key_name_of(key)
        if name is None:
            return
        with self._state.lock:
            self._state.check_open()
            found = self._state.registry.find(name)
            told = self._unbind(name, found[0]) if found else []
        flush(told)

    def pulled(self, record: Record, name: KeyName, first_tensor: int, tensor_stop: int) -> None:
        """A peer has these tensors of the slot that ``name`` found in ``record``; all: the key goes. Does not block."""
        state = self._state
        with state.lock:
            found = state.registry.find(name)
            if (
                found is None or found[0].cache_id != record.cache_id
            ):  # it went meanwhile, or is another's now
                return
            if record.is_blocks or not state.pools.has(record.cache_id):
                return
            if not state.registry.note_pulled(name, first_tensor, tensor_stop):
                return
            told = self._unbind(name, record)
        flush(told)

    def _unbind(self, name: KeyName, record: Record) -> list[Link]:
        """Takes a key away, and with the last one a deallocated cache. The caller holds the lock; no waiting."""
        state, cache_id = self._state, record.cache_id
        state.registry.unbind(name)
        if not state.pools.is_unowned(cache_id) or state.registry.names_of(record):
            return self._catalog.announce(record)
        told = self._catalog.take_out(cache_id) or []
        if self._catalog.is_unused(cache_id):
            state.pools.free(cache_id)
            state.regions.free(cache_id)
        else:  # others hold a lease: they finish first
            state.workers.submit(("free", cache_id), lambda: self._catalog.free_when_unused(cache_id))
        return told
