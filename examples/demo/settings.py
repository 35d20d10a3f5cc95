"""What both processes are told. The prompt is not part of it: only prefill gets that."""

from __future__ import annotations

from dataclasses import dataclass

PREFILL_ID = 1
DECODE_ID = 2

BLOCK_SIZE = 16
# Different numbers: nothing in a transfer may rely on both sides being alike.
PREFILL_BLOCKS = 128
DECODE_BLOCKS = 160
POOL_NBYTES = 256 << 20  # for the KV of SmolLM2-135M in the larger of the two: 118 MB


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of one run."""

    model: str
    max_tokens: int
    transport: str
    mode: str
    layerwise: bool
    corrupt: bool
    seed: int | None
    port: int
