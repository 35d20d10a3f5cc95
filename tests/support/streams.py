"""The slow and plain reading of a plan: the address of every single byte, in stream order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llm_datadist._core.layout import CacheSlice, Layout
from llm_datadist._core.segments import U64, Extents

U8 = NDArray[np.uint8]


def addresses_of(extents: Extents) -> list[int]:
    """One address per byte of the stream, by loops over what the fields say."""
    return [
        base + offset + at
        for base in extents.bases.tolist()
        for offset, length in zip(extents.offsets.tolist(), extents.lengths.tolist(), strict=True)
        for at in range(length)
    ]


@dataclass
class FlatCache:
    """A cache in a pretended address space; ``memory[0]`` lies at ``origin``, tensors ``gap`` bytes apart."""

    layout: Layout
    origin: int
    memory: U8
    bases: U64

    @classmethod
    def of(cls, layout: Layout, origin: int, seed: int, gap: int = 3) -> FlatCache:
        pitch = layout.tensor_nbytes + gap
        memory = np.random.default_rng(seed).integers(0, 256, layout.num_tensors * pitch, dtype=np.uint8)
        bases = np.array([origin + t * pitch for t in range(layout.num_tensors)], dtype=np.uint64)
        return cls(layout, origin, memory, bases)

    def unit(self, tensor: int, index: int) -> U8:
        """A view of one slot or block."""
        start = int(self.bases[tensor]) - self.origin + index * self.layout.stride_nbytes
        return self.memory[start : start + self.layout.stride_nbytes]

    def copy(self) -> FlatCache:
        return FlatCache(self.layout, self.origin, self.memory.copy(), self.bases)


def run(src: FlatCache, dst: FlatCache, source: CacheSlice, target: CacheSlice) -> None:
    """Moves what the two slices say, byte by byte in stream order."""
    reads, writes = addresses_of(source.extents(src.bases)), addresses_of(target.extents(dst.bases))
    assert len(reads) == len(writes) == source.nbytes == target.nbytes
    assert len(set(writes)) == len(writes)
    dst.memory[np.array(writes, dtype=np.int64) - dst.origin] = src.memory[
        np.array(reads, dtype=np.int64) - src.origin
    ]
