"""What transports that need registration know of our memory: the tokens of each cache.

Pools are registered once, whole; every other cache when it is registered, until nobody uses it any more.
Threads: any. Registering and forgetting may take long, so never under the engine's lock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

import numpy as np

from llm_datadist._core.segments import U64
from llm_datadist._logs import get_logger
from llm_datadist.enums import Placement
from llm_datadist.transports.seam import Region, RegisteringTransport, RegistrationRefused

_LOG = get_logger("llm_datadist.cache")
Tokens: TypeAlias = Mapping[str, bytes]
"""By transport: what lets peers reach memory with it."""


class Regions:
    """Memory of one engine as its registering transports know it."""

    def __init__(self) -> None:
        self._transports: list[RegisteringTransport] = []
        self._of_cache: dict[int, Tokens] = {}
        self._of_pool: dict[Placement, Tokens] = {}

    def use(self, transport: RegisteringTransport) -> None:
        """From now on memory is registered with it as well."""
        self._transports.append(transport)

    def add_pool(self, placement: Placement, address: int, nbytes: int) -> None:
        """Registers a pool, for all caches that will be in it."""
        self._of_pool[placement] = self.register(np.array([address], dtype=np.uint64), nbytes)

    def register(self, bases: U64, nbytes: int) -> Tokens:
        """Registers ``nbytes`` at each base; a transport that cannot work with it has no token."""
        tokens = {}
        for transport in self._transports:
            try:
                tokens[transport.name] = transport.register(Region(bases, nbytes))
            except RegistrationRefused as exc:
                _LOG.info(
                    "%d tensors of %d bytes go by another transport than %s: %s",
                    len(bases), nbytes, transport.name, exc,
                )  # fmt: skip
        return tokens

    def forget(self, tokens: Tokens) -> None:
        """The end of a ``register``."""
        for transport in self._transports:
            if transport.name in tokens:
                transport.unregister(tokens[transport.name])

    def keep(self, cache_id: int, tokens: Tokens) -> None:
        """The cache whose memory this is."""
        if tokens:
            self._of_cache[cache_id] = tokens

    def keep_pooled(self, cache_id: int, placement: Placement) -> None:
        """A cache in a pool."""
        self.keep(cache_id, self._of_pool.get(placement, {}))

    def free(self, cache_id: int) -> None:
        """Forgets what a cache has, if it is not a pool's."""
        own = self.has(cache_id)
        tokens = self._of_cache.pop(cache_id, {})
        if own:
            self.forget(tokens)

    def has(self, cache_id: int) -> bool:
        """Whether a cache that is not in a pool has been registered with any."""
        tokens = self._of_cache.get(cache_id)
        return tokens is not None and not any(tokens is pooled for pooled in self._of_pool.values())

    def renew(self, cache_id: int, bases: U64, nbytes: int) -> bool:
        """Registers the memory of a cache again, which was mapped anew; whether anything changed for peers."""
        if cache_id not in self._of_cache:
            return False
        self.free(cache_id)
        self.keep(cache_id, self.register(bases, nbytes))
        return True

    def token(self, cache_id: int, names: Iterable[str]) -> bytes:
        """What lets a peer that reads by these transports reach that cache; empty if nothing does."""
        tokens = self._of_cache.get(cache_id)
        return next((tokens[name] for name in names if name in tokens), b"") if tokens else b""
