"""Mode B: our copy of one peer's cache table. Pure; called under the engine's lock."""

from __future__ import annotations

from dataclasses import dataclass, field

from llm_datadist._core.layout import Layout
from llm_datadist._core.registry import GenerationWord, KeyName
from llm_datadist._core.segments import U64


@dataclass(frozen=True, slots=True, eq=False)
class RemoteCache:
    """A cache as its owner described it. ``addresses`` is empty when we do not read by address."""

    cache_id: int
    layout: Layout
    is_blocks: bool
    word: GenerationWord
    addresses: U64
    keys: tuple[tuple[KeyName, int], ...] = ()


@dataclass(slots=True)
class RemoteTable:
    """The peer's remote-accessible caches by id and by key."""

    _caches: dict[int, RemoteCache] = field(default_factory=dict)
    _bound: dict[KeyName, tuple[int, int]] = field(default_factory=dict)

    def put(self, cache: RemoteCache) -> None:
        """Enters or replaces a cache; a key that another one had is its now."""
        self.drop(cache.cache_id)
        self._caches[cache.cache_id] = cache
        for name, batch in cache.keys:
            self._bound[name] = (cache.cache_id, batch)

    def drop(self, cache_id: int) -> None:
        """Forgets a cache."""
        gone = self._caches.pop(cache_id, None)
        for name, _ in gone.keys if gone else ():
            if self._bound.get(name, (0, 0))[0] == cache_id:
                del self._bound[name]

    def find(self, name: KeyName) -> tuple[RemoteCache, int] | None:
        """The cache and the batch index that a name finds."""
        if name.kind == "cache":
            cache = self._caches.get(name.id)
            return (cache, 0) if cache else None
        bound = self._bound.get(name)
        return (self._caches[bound[0]], bound[1]) if bound else None
