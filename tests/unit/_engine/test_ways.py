"""Which of a link's channels a read takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from llm_datadist._core.segments import Extents
from llm_datadist._engine.ways import Way, way_for
from llm_datadist.transports.seam import TransportCaps


class Channel:
    """Reaches one base; knows the tokens that it was given."""

    def __init__(self, base: int, token: bytes = b"") -> None:
        self.base, self.token = base, token
        self.admitted: list[bytes] = []

    def admit(self, token: bytes) -> None:
        self.admitted.append(token)

    def covers(self, source: Extents) -> bool:
        return source.bases.tolist() == [self.base] and (not self.token or self.token in self.admitted)


def way(name: str, channel: Any = None, **caps: Any) -> Way:
    caps = {"one_sided": True, "same_host_only": True, **caps}
    return Way(name, TransportCaps(**caps), channel, channel if caps["one_sided"] else None)


def source(base: int, *lengths: int) -> Extents:
    offsets = np.arange(len(lengths), dtype=np.uint64) * np.uint64(1 << 20)
    return Extents.of(np.array([base], dtype=np.uint64), offsets, np.array(lengths, dtype=np.uint64))


SHM = way("shm", Channel(1), partial=True, best_below_nbytes=4096)
NIXL = way("nixl", Channel(2, b"token"), partial=True, needs_registration=True)
LOCAL = way("local")
TCP = way("tcp", one_sided=False)


@pytest.mark.parametrize(
    ("ways", "base", "lengths", "chosen"),
    [
        ((LOCAL,), 1, (8,), "local"),
        ((SHM, LOCAL), 1, (8,), "shm"),
        ((SHM, LOCAL), 1, (4095, 4096), "shm"),
        ((SHM, LOCAL), 1, (4096,), "local"),
        ((SHM, LOCAL), 9, (8,), "local"),
        ((SHM, TCP), 1, (1 << 20,), "shm"),  # tcp would need the owner; no run is too long for that
        ((SHM, TCP), 9, (8,), "tcp"),
        ((SHM, NIXL, TCP), 2, (8,), "nixl"),
        ((SHM, NIXL, TCP), 9, (8,), "tcp"),
        ((SHM,), 1, (1 << 20,), "shm"),
        ((SHM,), 9, (8,), None),
    ],
)
def test_the_first_that_reaches_it_and_is_fast(
    ways: tuple[Way, ...], base: int, lengths: tuple[int, ...], chosen: str | None
) -> None:
    found = way_for(ways, source(base, *lengths), b"token")
    assert (found.name if found else None) == chosen


def test_without_its_token_memory_is_out_of_reach() -> None:
    nixl = way("nixl", Channel(2, b"token"), partial=True, needs_registration=True)
    assert way_for((nixl, TCP), source(2, 8), b"") is TCP
    assert way_for((nixl, TCP), source(2, 8), b"token") is nixl
