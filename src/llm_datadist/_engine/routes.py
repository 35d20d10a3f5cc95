"""Routes: what a pull of one block from a peer into a cache of ours found out, so that the next one need not.

Thread rule: ``find`` from any thread; everything else under the engine's lock.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from llm_datadist._core.registry import GenerationWord, KeyName, Record
from llm_datadist._core.remote_table import Found, RemoteCache
from llm_datadist._engine.flights import Flight
from llm_datadist.devices.writability import Again

MAX_ROUTES = 1024  # of one peer: pairs of a model there and a cache here


class ShortWay(Protocol):
    """What a repeated pull of one block of each tensor needs, prepared. Threads: any, several at once."""

    def move(self, flight: Flight, src: int, dst: int, deadline: float) -> bool:
        """Moves block ``src`` of the peer's cache to block ``dst`` of ours; a cut of the flight ends it.

        Returns:
            True: it came whole, of a cache that was still there after its last byte. False: anything else,
            whatever it is; ``dst`` may have changed. Nothing is written afterwards in either case.
        """


class Route(msgspec.Struct, frozen=True, eq=False):
    """From the cache that a key finds at the peer into a cache of ours.

    Attributes:
        name: The key.
        cache: What it found.
        word: What says that it is still there.
        version: Of the peer's table when that was looked up.
        record: The destination.
        short: The short way; None: there is none.
        memory: Whether the destination may be written.
    """

    name: KeyName
    cache: RemoteCache
    word: GenerationWord
    version: int
    record: Record
    short: ShortWay | None
    memory: Again

    def leads_to(self, found: Found) -> bool:
        """Whether the key finds now what it found then."""
        return found.cache is self.cache and found.word == self.word


class Routes:
    """The routes from one peer, by model there and cache here; the oldest goes when there are too many."""

    __slots__ = ("_routes",)

    def __init__(self) -> None:
        self._routes: dict[tuple[int, int], Route] = {}

    def find(self, model_id: int, cache_id: int) -> Route | None:
        """The route, as it was when it was kept."""
        return self._routes.get((model_id, cache_id))

    def keep(self, route: Route) -> None:
        """Enters a route, or replaces it."""
        at = (route.name.model_id, route.record.cache_id)
        if at not in self._routes and len(self._routes) >= MAX_ROUTES:
            del self._routes[next(iter(self._routes))]
        self._routes[at] = route

    def forget(self, cache_id: int) -> None:
        """Drops those into one of our caches."""
        for at in [at for at in self._routes if at[1] == cache_id]:
            del self._routes[at]

    def clear(self) -> None:
        """Drops all."""
        self._routes.clear()

    def __len__(self) -> int:
        return len(self._routes)
