"""The caches of one engine and the keys that find them: pure bookkeeping, called under the engine's lock.

A cache is found by its id or by a key name; a request or prefix key names one slot of a cache, a blocks
key a whole blocks cache. The cluster id inside a key plays no part. Ids count from 1 and only a
successful ``add`` takes one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llm_datadist._core.layout import Layout
from llm_datadist._core.open_memory import OpenMemory
from llm_datadist._core.segments import U64
from llm_datadist.caches import CacheDesc
from llm_datadist.keys import INVALID_ID, BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex
from llm_datadist.status import ParamInvalidError


class KeyName(NamedTuple):
    """A key without its cluster. ``kind``: "req" or "prefix" (id, model), "blocks" (model), "cache" (id)."""

    kind: str
    id: int
    model_id: int


class GenerationWord(NamedTuple):
    """A 64-bit word in our slab and the random value that it has while what it stands for is valid."""

    address: int
    value: int


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """One registered cache. ``keys``: the names that it was registered with, and their batch indices."""

    cache_id: int
    desc: CacheDesc
    layout: Layout
    addresses: U64
    is_blocks: bool
    remote_accessible: bool
    word: GenerationWord
    keys: tuple[tuple[KeyName, int], ...]

    def touches(self, starts: U64, ends: U64) -> bool:
        """Whether any of the ranges [start, end) meets one of the tensors."""
        mine_end = self.addresses + np.uint64(self.layout.tensor_nbytes)
        return bool(((starts[:, None] < mine_end) & (ends[:, None] > self.addresses)).any())


def request_name(key: CacheKey | CacheKeyByIdAndIndex | BlocksCacheKey) -> KeyName:
    """The name by which a pull or push looks for its other end.

    Raises:
        ParamInvalidError: A CacheKey with both or neither of req_id and prefix_id.
    """
    if isinstance(key, BlocksCacheKey):
        return KeyName("blocks", 0, key.model_id)
    if isinstance(key, CacheKeyByIdAndIndex):
        return KeyName("cache", key.cache_id, 0)
    name = _slot_name(key)
    if name is None:
        raise ParamInvalidError(f"{key!r} has neither a req_id nor a prefix_id; set exactly one of them")
    return name


def key_name_of(key: CacheKey | CacheKeyByIdAndIndex | BlocksCacheKey) -> KeyName | None:
    """The name that a key binds; None when it binds none (a placeholder, or a cache id)."""
    if isinstance(key, CacheKey):
        return _slot_name(key)
    return request_name(key) if isinstance(key, BlocksCacheKey) else None


def key_of(name: KeyName, cluster_id: int) -> CacheKey | BlocksCacheKey:
    """The key that binds a name, with a cluster id."""
    if name.kind == "blocks":
        return BlocksCacheKey(cluster_id, name.model_id)
    if name.kind == "prefix":
        return CacheKey(cluster_id, INVALID_ID, name.model_id, name.id)
    return CacheKey(cluster_id, name.id, name.model_id)


def _slot_name(key: CacheKey) -> KeyName | None:
    """The name of a slot; None for a placeholder (neither id is set)."""
    if key.req_id != INVALID_ID and key.prefix_id != INVALID_ID:
        raise ParamInvalidError(f"{key!r} has both a req_id and a prefix_id; set exactly one of them")
    if key.prefix_id != INVALID_ID:
        return KeyName("prefix", key.prefix_id, key.model_id)
    return KeyName("req", key.req_id, key.model_id) if key.req_id != INVALID_ID else None


def _no_word() -> GenerationWord:
    return GenerationWord(0, 0)


def _nothing(word: GenerationWord) -> None:
    return None


@dataclass(slots=True)
class Registry:
    """Caches by id, and slots by key name.

    A key that is bound has a word of its own: a reader whose copy of our table is behind must notice that the
    key was taken over or removed, although the cache that it used to find is still there.

    Attributes:
        new_word: Makes a word with a random value.
        clear_word: Clears one and gives its slot back.
    """

    new_word: Callable[[], GenerationWord] = _no_word
    clear_word: Callable[[GenerationWord], None] = _nothing
    _records: dict[int, Record] = field(default_factory=dict)
    _bound: dict[KeyName, tuple[int, int]] = field(default_factory=dict)
    _words: dict[KeyName, GenerationWord] = field(default_factory=dict)
    # Value of a key's word -> the cache that the key finds.
    _finds: dict[int, int] = field(default_factory=dict)
    # (Cache, slot) -> its request key.
    _requests: dict[tuple[int, int], KeyName] = field(default_factory=dict)
    _pulled: dict[KeyName, NDArray[np.bool_]] = field(default_factory=dict)
    _open: OpenMemory | None = None  # of now, once it was asked for
    _next_id: int = 1

    def check_keys(
        self, keys: Sequence[CacheKey] | Sequence[BlocksCacheKey], layout: Layout
    ) -> tuple[tuple[KeyName, int], ...]:
        """The names that these keys would bind, by batch index.

        Raises:
            ParamInvalidError: Too many, bound already, or twice in the call.
        """
        if len(keys) and isinstance(keys[0], BlocksCacheKey):
            return ((request_name(keys[0]), 0),)
        if len(keys) > layout.dim0:
            raise ParamInvalidError(
                f"{len(keys)} cache keys for a cache with {layout.dim0} slots; one per slot at most"
            )
        names: dict[KeyName, int] = {}
        for batch, key in enumerate(keys):
            name = _slot_name(key)  # type: ignore[arg-type]
            if name is None:
                continue
            if name in names:
                raise ParamInvalidError(
                    f"cache_keys[{batch}] {key!r} is also cache_keys[{names[name]}]; a key names one slot"
                )
            if name in self._bound:
                raise ParamInvalidError(
                    f"cache_keys[{batch}] {key!r} is bound to cache {self._bound[name][0]}; unregister that first"
                )
            names[name] = batch
        return tuple(names.items())

    def add(
        self,
        desc: CacheDesc,
        layout: Layout,
        addresses: U64,
        names: tuple[tuple[KeyName, int], ...],
        *,
        is_blocks: bool,
        remote_accessible: bool,
        word: GenerationWord,
    ) -> tuple[Record, Record | None]:
        """Enters a cache. ``names`` come from :meth:`check_keys`.

        Returns:
            The record, and the blocks cache whose key it took over, if any.
        """
        words = self._words_for(names)  # what may fail comes first
        cache_id = self._next_id
        self._next_id += 1
        record = Record(cache_id, desc, layout, addresses, is_blocks, remote_accessible, word, names)
        displaced = None
        for name, batch in names:
            if name in self._bound:
                displaced = self._records[self._bound[name][0]]
                self._forget(name)
            self._bound[name] = (cache_id, batch)
            self._words[name] = words[name]
            self._finds[words[name].value] = cache_id
            if name.kind == "req":
                self._requests.setdefault((cache_id, batch), name)
        self._records[cache_id] = record
        self._open = None
        return record, displaced

    def replace(self, record: Record) -> None:
        """Enters a record in the place of the one with its id; keys find the new one, readers of the old notice."""
        self._records[record.cache_id] = record
        self._open = None
        for name, _ in self.names_of(record):
            self._drop_word(name)
            self._set_word(name, record.cache_id)

    def remove(self, cache_id: int) -> Record | None:
        """Takes a cache out, with the keys that still find it."""
        record = self._records.pop(cache_id, None)
        self._open = None
        for name, _ in record.keys if record else ():
            if self._bound.get(name, (0, 0))[0] == cache_id:
                self._forget(name)
        return record

    def bind_again(self, record: Record) -> bool:
        """The blocks key of a cache finds it again, if the cache is there and nothing else has the key."""
        names = [n for n, _ in record.keys if n.kind == "blocks" and n not in self._bound]
        if record.cache_id not in self._records or not names:
            return False
        for name in names:
            self._bound[name] = (record.cache_id, 0)
            self._set_word(name, record.cache_id)
        return True

    def unbind(self, name: KeyName) -> Record | None:
        """Takes a key away; the cache that it found, if it found one."""
        found = self._bound.get(name)
        if found is None:
            return None
        self._forget(name)
        return self._records[found[0]]

    def _forget(self, name: KeyName) -> None:
        slot = self._bound.pop(name)
        if self._requests.get(slot) == name:
            del self._requests[slot]
        self._drop_word(name)
        self._pulled.pop(name, None)

    def _words_for(self, names: tuple[tuple[KeyName, int], ...]) -> dict[KeyName, GenerationWord]:
        """A word for each; none is left if one cannot be had."""
        words: dict[KeyName, GenerationWord] = {}
        try:
            for name, _ in names:
                words[name] = self.new_word()
        except BaseException:
            for word in words.values():
                self.clear_word(word)
            raise
        return words

    def _set_word(self, name: KeyName, cache_id: int) -> None:
        word = self._words[name] = self.new_word()
        self._finds[word.value] = cache_id

    def _drop_word(self, name: KeyName) -> None:
        word = self._words.pop(name)
        self._finds.pop(word.value, None)
        self.clear_word(word)

    def note_pulled(self, name: KeyName, first_tensor: int, tensor_stop: int) -> bool:
        """A peer has tensors [first, stop) of the slot that a key finds; whether all have been pulled by now."""
        record = self._records[self._bound[name][0]]
        seen = self._pulled.setdefault(name, np.zeros(record.layout.num_tensors, dtype=bool))
        seen[max(0, first_tensor) : max(0, tensor_stop)] = True
        return bool(seen.all())

    def request_key_of(self, cache_id: int, batch: int) -> KeyName | None:
        """The request key bound to a slot of a cache."""
        return self._requests.get((cache_id, batch))

    def get(self, cache_id: int) -> Record | None:
        """The cache with this id."""
        return self._records.get(cache_id)

    def find(self, name: KeyName) -> tuple[Record, int] | None:
        """The cache that a name finds, and the batch index bound to it (0 for ids and blocks)."""
        if name.kind == "cache":
            record = self._records.get(name.id)
            return (record, 0) if record else None
        bound = self._bound.get(name)
        return (self._records[bound[0]], bound[1]) if bound else None

    def records(self) -> list[Record]:
        """All caches, in order of their ids."""
        return list(self._records.values())

    def names_of(self, record: Record) -> tuple[tuple[KeyName, int], ...]:
        """The names that find this cache now."""
        return tuple((n, b) for n, b in record.keys if self._bound.get(n) == (record.cache_id, b))

    def bindings_of(self, record: Record) -> tuple[tuple[KeyName, int, GenerationWord], ...]:
        """The names that find this cache now, with their batch indices and words."""
        return tuple((name, batch, self._words[name]) for name, batch in self.names_of(record))

    def binding_of(self, name: KeyName) -> tuple[tuple[KeyName, int, GenerationWord], ...]:
        """One bound name, as ``bindings_of`` gives it; nothing for a cache id."""
        bound = self._bound.get(name)
        return ((name, bound[1], self._words[name]),) if bound else ()

    def is_current(self, record: Record, generation: int) -> bool:
        """Whether that is the value of the cache's word, or of one of the keys that find it."""
        return generation == record.word.value or self._finds.get(generation) == record.cache_id

    def open_memory(self) -> OpenMemory:
        """What peers may write, as it is now: to be looked through without the lock."""
        if self._open is None:
            self._open = OpenMemory(tuple(r for r in self._records.values() if r.remote_accessible))
        return self._open
