"""What stands for the tensors of a model: host arrays with a pattern that tells block, tensor and request."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.uint8]


def kv_tensors(count: int, blocks: int, row_nbytes: int, seed: int | None) -> list[Array]:
    """Tensors [blocks, row_nbytes]: patterned with a seed, else empty."""
    if seed is None:
        return [np.zeros((blocks, row_nbytes), np.uint8) for _ in range(count)]
    return [rows(tensor, np.arange(blocks), row_nbytes, seed) for tensor in range(count)]


def rows(tensor: int, blocks: Any, row_nbytes: int, seed: int) -> Array:
    """What those blocks of a tensor hold."""
    numbers = (
        np.asarray(blocks, np.int64)[:, None] * 131 + np.arange(row_nbytes) * 7 + tensor * 29 + seed * 17
    )
    return (numbers % 251 + 1).astype(np.uint8)


def addresses(tensors: Sequence[Array]) -> list[int]:
    return [tensor.ctypes.data for tensor in tensors]


def check(tensors: Sequence[Array], got: Sequence[int], blocks: Sequence[int], seed: int) -> None:
    """Blocks ``got`` of these tensors are the peer's ``blocks``, all others are empty."""
    others = np.setdiff1d(np.arange(len(tensors[0])), got)
    for number, tensor in enumerate(tensors):
        assert np.array_equal(tensor[list(got)], rows(number, blocks, tensor.shape[1], seed)), (
            f"tensor {number}"
        )
        assert not tensor[others].any(), f"tensor {number}: blocks that nobody asked for"


def say(line: str) -> None:
    print(line, flush=True)


def wait_for_the_end() -> None:
    """Until the test closes our standard input."""
    sys.stdin.read()
