"""What one peer process holds between calls: an engine, caches and their memory, a baseline for leaks."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llm_datadist.testing.stopwatch import Stopwatch
from tests.support.arena import Arena, Piece, arena_of
from tests.support.memory import FILL, Mapping, pattern

GAP = 64  # guard bytes between the tensors of one cache


@dataclass
class Held:
    """A cache of a test: one piece of memory that holds its tensors, ``GAP`` guard bytes apart."""

    mapping: Mapping | Piece
    tensors: int
    tensor_nbytes: int
    starts: list[int]
    cache: Any = None
    desc: Any = None

    @property
    def addresses(self) -> list[int]:
        return [self.mapping.address + start for start in self.starts]

    def whole(self) -> NDArray[np.uint8]:
        return self.mapping.view(0, self.mapping.nbytes)

    def tensor(self, index: int) -> NDArray[np.uint8]:
        return self.mapping.view(self.starts[index], self.tensor_nbytes)

    def fill(self, seed: int | None) -> None:
        self.whole()[:] = FILL
        if seed is not None:
            for t in range(self.tensors):
                self.tensor(t)[:] = pattern(seed, t, self.tensor_nbytes)


@dataclass
class World:
    """State of one peer."""

    dist: Any = None
    held: dict[str, Held] = field(default_factory=dict)
    extras: dict[str, Any] = field(default_factory=dict)
    baseline: tuple[int, int] = (0, 0)
    arena: Arena | None = None

    def hold(
        self, name: str, tensors: int, tensor_nbytes: int, skew: int = 0, address: int = 0, gap: int = GAP,
        own: bool = False,
    ) -> Held:  # fmt: skip
        """Memory for a cache. ``own``: in a mapping of its own, also where the engine has a pool for tests."""
        pitch = tensor_nbytes + gap
        mapping = self._memory(skew + tensors * pitch, address, own or bool(address))
        held = Held(mapping, tensors, tensor_nbytes, [skew + t * pitch for t in range(tensors)])
        self.held[name] = held
        return held

    def _memory(self, nbytes: int, address: int, own: bool) -> Mapping | Piece:
        if own:
            return Mapping(nbytes, address)
        if self.arena is None or not self.arena.alive:
            self.arena = arena_of(self.dist)
        return Mapping(nbytes) if self.arena is None else self.arena.take(nbytes)

    def release(self) -> None:
        """Everything back to the start; the engine first, then the memory under it."""
        if self.dist is not None:
            with contextlib.suppress(RuntimeError):
                self.dist.finalize()
            self.dist = None
        self.arena = None
        for extra in self.extras.values():
            if hasattr(extra, "finalize"):
                extra.finalize()
            elif hasattr(extra, "close"):
                extra.close()
        self.extras.clear()
        for held in self.held.values():
            held.mapping.close()
        self.held.clear()


def footprint() -> tuple[int, int]:
    """Open descriptors and threads of this process, the harness's own threads not counted."""
    threads = [t for t in threading.enumerate() if not t.name.startswith("harness-")]
    return len(os.listdir("/proc/self/fd")), len(threads)


def wait_until(condition: Callable[[], bool], timeout: float = 5.0) -> bool:
    """Polls until the condition holds; False when it does not within the time that the machine gave."""
    if condition():
        return True
    watch = Stopwatch()
    while not condition():
        if not watch.within(timeout):
            return False
        time.sleep(0.005)
    return True
