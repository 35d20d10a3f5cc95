"""What the drivers of other libraries share: a command per line of JSON, and memory that is written.

Run by the interpreter of that library's environment: NumPy and the standard library only.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Memory:
    """T tensors of blocks, as NumPy arrays like those of the other candidates."""

    def __init__(self, tensors: int, blocks: int, block_nbytes: int, seed: int) -> None:
        self.block_nbytes = block_nbytes
        self.tensor_nbytes = blocks * block_nbytes
        self.arrays = [
            np.random.default_rng(seed + i).integers(0, 256, self.tensor_nbytes, dtype=np.uint8)
            for i in range(tensors)
        ]

    @property
    def addresses(self) -> list[int]:
        return [int(array.ctypes.data) for array in self.arrays]

    def peek(self, tensor: int, block: int) -> str:
        address = self.addresses[tensor] + block * self.block_nbytes
        return ctypes.string_at(address, self.block_nbytes).hex()


def blocks_of(bases: Sequence[int], blocks: Sequence[int], block_nbytes: int) -> NDArray[np.uint64]:
    """Address of every block, tensor by tensor."""
    offsets = np.array(blocks, np.uint64) * np.uint64(block_nbytes)
    return (np.array(bases, np.uint64)[:, None] + offsets).reshape(-1)


def serve(commands: Mapping[str, Callable[..., Any]]) -> None:
    """Answers commands until the input ends. What the library prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = {"ok": commands[command["do"]](**command["args"])}
        except Exception as exc:
            answer = {"error": f"{type(exc).__name__}: {exc}"}
        print(json.dumps(answer), file=answers, flush=True)
