"""The short way of a pull of one block that has been pulled along the same route before (mode B).

Strategy: a plain pull leaves a ``Route``: both caches, and a read that the channel has prepared. The next
pull looks, in one section under the lock, whether everything is as it was; then the block moves in one step,
between two looks at the word.
Invariant: it only ever completes a pull that the plain way would complete, with the same bytes. Whatever is
not as it was, or fails, is left to the plain way, which does the call from its start and knows every rule and
every text. So nothing here says why something cannot be done.
"""

from __future__ import annotations

from typing import Any, cast

import msgspec
import numpy as np

from llm_datadist._core.layout import Layout
from llm_datadist._core.registry import GenerationWord, Record, request_name
from llm_datadist._core.remote_table import RemoteCache
from llm_datadist._core.requests import PullBlocks, PullCache
from llm_datadist._core.segments import U64, Extents
from llm_datadist._engine.flights import Flight
from llm_datadist._engine.routes import Route, ShortWay
from llm_datadist._engine.state import Peer, State, peer_of
from llm_datadist._engine.ways import way_for
from llm_datadist._link.link import Link
from llm_datadist.caches import Cache
from llm_datadist.keys import BlocksCacheKey
from llm_datadist.transports.seam import Fault, RowsChannel


class Express:
    """Pulls of single blocks of this engine's callers."""

    def __init__(self, state: State) -> None:
        self._state = state

    # ---- along a route -------------------------------------------------------------------------------

    def pull(self, key: Any, cache: Any, src_blocks: Any, dst_blocks: Any, started: float) -> bool:
        """Pulls a block along a known route.

        Args:
            key: As a caller gave it, of whatever type.
            cache: The same.
            src_blocks: The same.
            dst_blocks: The same.
            started: When the call began.

        Returns:
            Whether the pull is complete. If not, the destination block may have changed.

        Raises:
            LLMException: What the pull was cut off with.
        """
        if type(key) is not BlocksCacheKey or type(cache) is not Cache:
            return False
        if type(src_blocks) is not list or type(dst_blocks) is not list:
            return False
        if len(src_blocks) != 1 or len(dst_blocks) != 1:
            return False
        link = self._state.links.get(key.cluster_id)
        if link is None:
            return False
        route = peer_of(link).routes.find(key.model_id, cache.cache_id)
        src, dst = src_blocks[0], dst_blocks[0]
        if route is None or route.short is None or type(src) is not int or type(dst) is not int:
            return False
        if not 0 <= src < route.cache.layout.dim0 or not 0 <= dst < route.record.layout.dim0:
            return False
        return self._fly(link, route, cache, src, dst, started)

    def _fly(self, link: Link, route: Route, cache: Cache, src: int, dst: int, started: float) -> bool:
        state = self._state
        flight = Flight(link, (route.record.cache_id,))
        flight.run_here()

        def body() -> bool:
            with state.lock:
                if not self._stands(link, route, cache):
                    return False
                state.flights.begin(flight)
            return self._move(flight, route, src, dst, started)

        if state.flights.fly(flight, body):
            return True
        flight.check()
        return False

    def _stands(self, link: Link, route: Route, cache: Cache) -> bool:
        """Whether the plain way would begin, and go the same route. The caller holds the lock."""
        state = self._state
        peer = cast(Peer, link.context)
        if state.closed is not None or state.draining:
            return False
        if peer.closing or state.by_token.get(link.token) is not link:
            return False
        if not cache.belongs_to(state.life) or state.registry.get(cache.cache_id) is not route.record:
            return False
        table = peer.table
        if table.version != route.version:
            found = table.find(route.name)
            if found is None or not route.leads_to(found):
                return False
            peer.routes.keep(msgspec.structs.replace(route, version=table.version))
        return True

    def _move(self, flight: Flight, route: Route, src: int, dst: int, started: float) -> bool:
        """Whether the whole block came, of a cache that was still there after its last byte."""
        peer, short = cast(Peer, flight.link.context), route.short
        deadline = started + self._state.timeout_s
        stride = route.record.layout.stride_nbytes
        if short is None or not _is_intact(peer, short, route.word, deadline) or flight.error is not None:
            return False
        if not short.rows.read(src * stride, dst * stride, deadline=deadline):
            return False
        if not _is_intact(peer, short, route.word, deadline):
            return False
        peer.count_in(stride * route.record.layout.num_tensors)
        return True

    # ---- finding routes ------------------------------------------------------------------------------

    def learn(self, request: PullCache | PullBlocks) -> None:
        """Keeps the route that a plain pull has just gone, and whether there is a short way along it."""
        state, key = self._state, request.key
        if not state.accessible or not isinstance(request, PullBlocks) or len(request.dst_blocks) != 1:
            return
        if type(key) is not BlocksCacheKey or request.layers.src or request.layers.dst:
            return
        link = state.links.get(key.cluster_id)
        if link is None or not peer_of(link).by_address:
            return
        name = request_name(key)
        with state.lock:
            link = state.links.get(key.cluster_id)
            record = state.registry.get(request.cache.cache_id)
            if link is None or record is None:
                return
            peer = peer_of(link)
            found, version = peer.table.find(name), peer.table.version
            known = peer.routes.find(name.model_id, record.cache_id)
        if found is None or state.find_sibling(link.identity.instance) is not None:
            return  # within one process source and destination may overlap, which is looked at every time
        if known is not None and known.record is record and known.leads_to(found):
            return
        short = _short_way(peer, found.cache, record)
        with state.lock:
            if state.registry.get(record.cache_id) is record:
                peer.routes.keep(Route(name, found.cache, found.word, version, record, short))


def _is_intact(peer: Peer, short: ShortWay, word: GenerationWord, deadline: float) -> bool:
    """Whether the word is what it was; False also if that cannot be found out."""
    address, value = word
    found: int | Fault | None = peer.words.peek(address) if peer.words is not None else None
    if found is None:
        found = short.channel.read_word(address, deadline=deadline)
    return found == value


def _short_way(peer: Peer, cache: RemoteCache, record: Record) -> ShortWay | None:
    """The way of any block between these two caches, if its channel has a shorter one for repeated reads."""
    there, here = cache.layout, record.layout
    if there.num_tensors != here.num_tensors or there.stride_nbytes != here.stride_nbytes:
        return None
    source, destination = _whole(cache.addresses, there), _whole(record.addresses, here)
    way = peer.only_way or way_for(peer.ways, source, cache.token, destination)
    if way is None or not way.caps.rows:
        return None
    channel = cast(RowsChannel, way.channel)
    rows = channel.rows(source, destination, here.stride_nbytes)
    return None if rows is None else ShortWay(channel, rows)


def _whole(bases: U64, layout: Layout) -> Extents:
    run = np.array([0, layout.tensor_nbytes], dtype=np.uint64)
    return Extents.of(bases, run[:1], run[1:])
