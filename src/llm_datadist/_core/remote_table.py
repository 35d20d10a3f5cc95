"""Mode B: our copy of one peer's cache table. Pure; called under the engine's lock."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from llm_datadist._core.layout import Layout
from llm_datadist._core.registry import GenerationWord, KeyName
from llm_datadist._core.segments import U64

_CACHE_NBYTES = 2048  # the objects of one, its entry in the three tables included
_KEY_NBYTES = 480


class RemoteCache(msgspec.Struct, frozen=True, eq=False):
    """A cache as its owner described it.

    ``addresses`` is empty when we do not read by address; ``token`` is for a transport that needs registration.
    """

    cache_id: int
    layout: Layout
    is_blocks: bool
    word: GenerationWord
    addresses: U64
    keys: tuple[tuple[KeyName, int], ...] = ()
    key_words: Mapping[KeyName, GenerationWord] = msgspec.field(default_factory=dict)
    token: bytes = b""

    def word_for(self, name: KeyName) -> GenerationWord:
        """The word that a read by this name checks: the key's own, or the cache's for its id."""
        return self.key_words.get(name, self.word)


class Found(NamedTuple):
    """What a name finds: the cache, the batch index bound to it (0 for ids), and the word that a read checks."""

    cache: RemoteCache
    batch: int
    word: GenerationWord


@dataclass(slots=True)
class RemoteTable:
    """The peer's remote-accessible caches by id and by key.

    Attributes:
        version: Another one after every change.
        nbytes: Of memory that it takes, about.
    """

    version: int = field(default=0, compare=False)
    nbytes: int = field(default=0, compare=False)
    _caches: dict[int, RemoteCache] = field(default_factory=dict)
    _bound: dict[KeyName, tuple[int, int, GenerationWord]] = field(default_factory=dict)
    _names: dict[int, list[KeyName]] = field(default_factory=dict)
    _taken: dict[int, int] = field(default_factory=dict, compare=False)

    def put(self, cache: RemoteCache, *, more_keys: bool = False, most_nbytes: float = math.inf) -> None:
        """Enters or replaces a cache; a key that another one had is its now.

        Args:
            cache: The cache as announced.
            more_keys: Its keys come on top of those that it has here.
            most_nbytes: What the table may take with it; else it is left out, and its owner is asked for it.
        """
        self.version += 1
        if not more_keys:
            self.drop(cache.cache_id)
        nbytes = _CACHE_NBYTES + cache.addresses.nbytes + len(cache.token) + _KEY_NBYTES * len(cache.keys)
        if self.nbytes + nbytes > most_nbytes:
            for name, _ in cache.keys:  # whoever had it before has it no more
                self._bound.pop(name, None)
            return
        self.nbytes += nbytes
        self._taken[cache.cache_id] = self._taken.get(cache.cache_id, 0) + nbytes
        self._caches[cache.cache_id] = cache
        names = self._names.setdefault(cache.cache_id, [])
        for name, batch in cache.keys:
            self._bound[name] = (cache.cache_id, batch, cache.word_for(name))
            names.append(name)

    def drop(self, cache_id: int) -> None:
        """Forgets a cache."""
        self.version += 1
        self._caches.pop(cache_id, None)
        self.nbytes -= self._taken.pop(cache_id, 0)
        for name in self._names.pop(cache_id, ()):
            if self._bound.get(name, (0,))[0] == cache_id:
                del self._bound[name]

    def find(self, name: KeyName) -> Found | None:
        """The cache and the batch index that a name finds."""
        if name.kind == "cache":
            cache = self._caches.get(name.id)
            return Found(cache, 0, cache.word) if cache else None
        bound = self._bound.get(name)
        return Found(self._caches[bound[0]], bound[1], bound[2]) if bound else None
