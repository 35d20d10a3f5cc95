"""Routes: what a pull of one block from a peer into a cache of ours found out, so that the next one need not.

Thread rule: ``find`` from any thread; everything else under the engine's lock.
"""

from __future__ import annotations

import msgspec

from llm_datadist._core.registry import GenerationWord, KeyName, Record
from llm_datadist._core.remote_table import Found, RemoteCache
from llm_datadist.transports.seam import OneSidedChannel, Rows

MAX_ROUTES = 1024  # of one peer: pairs of a model there and a cache here


class ShortWay(msgspec.Struct, frozen=True, eq=False):
    """A channel, and a read of one block of each tensor that it has prepared."""

    channel: OneSidedChannel
    rows: Rows


class Route(msgspec.Struct, frozen=True, eq=False):
    """From the cache that a key finds at the peer into a cache of ours.

    Attributes:
        name: The key.
        cache: What it found.
        word: What says that it is still there.
        version: Of the peer's table when that was looked up.
        record: The destination.
        short: The short way; None: there is none.
    """

    name: KeyName
    cache: RemoteCache
    word: GenerationWord
    version: int
    record: Record
    short: ShortWay | None

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
