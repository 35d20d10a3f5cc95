"""Block lists of callers as uint64 arrays: types and the uint64 range, without a Python loop per block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from llm_datadist._core.segments import U64

BlockList: TypeAlias = Sequence[int] | NDArray[np.integer[Any]]
"""What callers may pass as a list of blocks."""

_LIMIT = 1 << 64


def as_indices(name: str, blocks: BlockList) -> U64:
    """A block list as a uint64 array of its own.

    Args:
        name: The argument's name, for the text.
        blocks: list, tuple or 1-dim NumPy integer array of block indices.

    Raises:
        TypeError: Not such a sequence, or an entry that is not an integer (bool and float are not).
        ValueError: An entry is negative or 2**64 or more.
    """
    if isinstance(blocks, np.ndarray):
        return _from_array(name, blocks)
    if not isinstance(blocks, (list, tuple)):
        raise TypeError(
            f"{name} must be a list, tuple or NumPy integer array of block indices, not {type(blocks).__name__}"
        )
    if not blocks:
        return np.empty(0, dtype=np.uint64)
    if len(blocks) == 1 and type(blocks[0]) is int and 0 <= blocks[0] < _LIMIT:
        return np.array(blocks, dtype=np.uint64)
    for kind in set(map(type, blocks)):
        if kind is bool or not issubclass(kind, (int, np.integer)):
            at = next(i for i, b in enumerate(blocks) if type(b) is kind)
            raise TypeError(f"{name}[{at}] must be an int, not {kind.__name__} ({blocks[at]!r})")
    low, high = min(blocks), max(blocks)
    if low < 0 or high >= _LIMIT:
        bad = low if low < 0 else high
        raise ValueError(f"{name}[{list(blocks).index(bad)}] is {bad}; a block index lies in [0, 2**64)")
    return np.array(blocks, dtype=np.uint64)


def _from_array(name: str, blocks: np.ndarray[Any, Any]) -> U64:
    if blocks.ndim != 1 or blocks.dtype.kind not in "iu":
        raise TypeError(f"{name} must be a 1-dim integer array, not {blocks.ndim}-dim {blocks.dtype}")
    if blocks.dtype.kind == "i" and blocks.size and int(blocks.min()) < 0:
        at = int(blocks.argmin())
        raise ValueError(f"{name}[{at}] is {blocks[at]}; a block index lies in [0, 2**64)")
    return blocks.astype(np.uint64)
