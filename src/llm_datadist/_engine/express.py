"""The short way of a pull of one block that has been pulled along the same route before (mode B).

Strategy: a plain pull leaves a ``Route``: both caches, and a short way between them. The next pull looks, in
one section under the lock, whether everything is as it was; then the block moves.
Invariant: it only ever completes a pull that the plain way would complete, with the same bytes. Whatever is
not as it was, or fails, is left to the plain way, which does the call from its start and knows every rule and
every text. So nothing here says why something cannot be done.
"""

from __future__ import annotations

from typing import Any

import msgspec

from llm_datadist._core.registry import request_name
from llm_datadist._core.requests import PullBlocks, PullCache
from llm_datadist._engine.flights import Flight
from llm_datadist._engine.routes import Route
from llm_datadist._engine.short_ways import short_way
from llm_datadist._engine.state import Peer, State, peer_of
from llm_datadist._link.link import Link
from llm_datadist.caches import Cache
from llm_datadist.keys import BlocksCacheKey


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
        peer = peer_of(link)
        route = peer.routes.find(key.model_id, cache.cache_id)
        src, dst = src_blocks[0], dst_blocks[0]
        if route is None or route.short is None or type(src) is not int or type(dst) is not int:
            return False
        if not 0 <= src < route.cache.layout.dim0 or not 0 <= dst < route.record.layout.dim0:
            return False
        return self._fly(link, peer, route, cache, src, dst, started)

    def _fly(
        self, link: Link, peer: Peer, route: Route, cache: Cache, src: int, dst: int, started: float
    ) -> bool:
        state = self._state
        flight = Flight(link, (route.record.cache_id,))
        flight.run_here()
        flight.reads = route.cache.cache_id  # before a look at the word: its owner clears it, then asks

        def body() -> bool:
            with state.lock:
                if not self._stands(link, peer, route, cache):
                    return False
                state.flights.begin(flight)
            return self._move(flight, peer, route, src, dst, started)

        if state.flights.fly(flight, body):
            return True
        flight.check()
        return False

    def _stands(self, link: Link, peer: Peer, route: Route, cache: Cache) -> bool:
        """Whether the plain way would begin, and go the same route. The caller holds the lock."""
        state = self._state
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

    def _move(self, flight: Flight, peer: Peer, route: Route, src: int, dst: int, started: float) -> bool:
        layout = route.record.layout
        stride = layout.stride_nbytes
        if route.short is None:
            return False
        if not route.memory.all_writable() and not route.memory.unit_writable(dst * stride, stride):
            return False
        if not route.short.move(flight, src, dst, started + self._state.timeout_s):
            return False
        peer.count_in(stride * layout.num_tensors)
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
        if link is None:
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
        short = short_way(peer, found, record)
        memory = state.memory_of(record)
        with state.lock:
            if state.registry.get(record.cache_id) is record:
                peer.routes.keep(Route(name, found.cache, found.word, version, record, short, memory))
