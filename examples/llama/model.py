"""A Llama decoder in NumPy, float32, whose KV cache is paged.

Names of dimensions: T new tokens, S tokens so far (the new ones included), H query heads, G KV heads,
R = H / G query heads that share one KV head (grouped-query attention), D width of a head.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
LayerHook = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Config:
    """The numbers that make a Llama."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_base: float
    norm_eps: float
    context: int


class PagedCache:
    """KV of many sequences in blocks of ``block_size`` tokens.

    One array [num_blocks, block_size, kv_heads, head_dim] per tensor, K of layer i at 2i and V at 2i + 1:
    a block is one entry of dim 0 in each of them, which is what ``register_blocks_cache`` takes. A sequence
    is described by its block table: token t lies in block ``table[t // block_size]``.

    Args:
        config: The model.
        num_blocks: Blocks in all.
        block_size: Tokens of a block.
        addresses: Memory for each tensor, which somebody else owns; None: memory of its own.
    """

    def __init__(
        self, config: Config, num_blocks: int, block_size: int, addresses: Sequence[int] | None = None
    ) -> None:
        shape = self.shape_of(config, num_blocks, block_size)
        self.block_size = block_size
        if addresses is None:
            # Written, not np.zeros: like an engine's cache this is memory that is there, not yet to be found.
            self.tensors = [np.full(shape, 0, np.float32) for _ in range(2 * config.layers)]
        else:
            floats = ctypes.c_float * int(np.prod(shape))
            self.tensors = [
                np.frombuffer(floats.from_address(a), np.float32).reshape(shape) for a in addresses
            ]
        # Dealt out of order, as in an engine that has run for a while: a transfer has to follow the tables.
        self._free: list[int] = np.random.default_rng(num_blocks).permutation(num_blocks).tolist()

    @staticmethod
    def shape_of(config: Config, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """Shape of each of the 2 x layers tensors."""
        return (num_blocks, block_size, config.kv_heads, config.head_dim)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of each tensor."""
        return self.tensors[0].shape

    @property
    def addresses(self) -> list[int]:
        """Where each tensor begins in memory."""
        return [tensor.ctypes.data for tensor in self.tensors]

    @property
    def block_nbytes(self) -> int:
        """Bytes of one block in one tensor."""
        return int(self.tensors[0][0].nbytes)

    def blocks_for(self, tokens: int) -> int:
        """Number of blocks that so many tokens need."""
        return (tokens + self.block_size - 1) // self.block_size

    def allocate(self, tokens: int) -> list[int]:
        """A block table for a sequence of so many tokens."""
        count = self.blocks_for(tokens)
        if count > len(self._free):
            raise ValueError(
                f"{tokens} tokens (prompt and answer) need {count} KV blocks of {self.block_size} tokens, "
                f"{len(self._free)} are free: use a shorter prompt or a smaller --max-tokens"
            )
        table, self._free = self._free[:count], self._free[count:]
        return table

    def free(self, table: Sequence[int]) -> None:
        """Gives the blocks of a sequence back."""
        self._free.extend(table)

    def write(self, layer: int, table: Sequence[int], start: int, k: Floats, v: Floats) -> None:
        """Stores K and V, each [T, G, D], of the tokens from position ``start`` on."""
        positions = np.arange(start, start + len(k))
        blocks, offsets = np.asarray(table)[positions // self.block_size], positions % self.block_size
        self.tensors[2 * layer][blocks, offsets] = k
        self.tensors[2 * layer + 1][blocks, offsets] = v

    def read(self, layer: int, table: Sequence[int], length: int) -> tuple[Floats, Floats]:
        """K and V, each [S, G, D], of the first ``length`` tokens."""
        blocks = table[: self.blocks_for(length)]
        k, v = (self.tensors[2 * layer + i][blocks] for i in (0, 1))
        return (
            k.reshape(-1, *k.shape[2:])[:length],
            v.reshape(-1, *v.shape[2:])[:length],
        )


class Llama:
    """The model. ``weights`` maps the names of a GGUF file to arrays; matrices are [out, in]."""

    def __init__(self, config: Config, weights: Mapping[str, Floats]) -> None:
        self.config = config
        self._weights = weights
        # Small models use the embedding a second time, as output matrix.
        self._output = weights.get("output.weight", weights["token_embd.weight"])
        pairs = np.arange(0, config.head_dim, 2, dtype=np.float64)
        self._frequencies = config.rope_base ** (-pairs / config.head_dim)

    def forward(
        self,
        tokens: Sequence[int],
        start: int,
        cache: PagedCache,
        table: Sequence[int],
        kv_written: LayerHook | None = None,
    ) -> Floats:
        """Runs tokens that stand at positions ``start``, ``start + 1``, …; their KV goes into the cache.

        Args:
            tokens: The tokens, T of them.
            start: Position of the first; the KV of the positions before it is in the cache already.
            cache: Where the KV lies.
            table: The sequence's blocks, enough for ``start + T`` tokens.
            kv_written: Called with each layer's number as soon as its K and V are in the cache, which is
                when that layer can be sent away.

        Returns:
            The logits of the token that follows the last one.
        """
        x = self._weights["token_embd.weight"][np.asarray(tokens)]
        cos, sin = self._rotation(start, len(tokens))
        for layer in range(self.config.layers):
            w = f"blk.{layer}."
            h = self._norm(x, w + "attn_norm")
            q = _rotate(self._heads(h, w + "attn_q"), cos, sin)
            k = _rotate(self._heads(h, w + "attn_k"), cos, sin)
            cache.write(layer, table, start, k, self._heads(h, w + "attn_v"))
            if kv_written is not None:
                kv_written(layer)
            attended = _attend(q, *cache.read(layer, table, start + len(tokens)), start)
            x = x + self._linear(attended, w + "attn_output")
            h = self._norm(x, w + "ffn_norm")
            gated = _silu(self._linear(h, w + "ffn_gate")) * self._linear(h, w + "ffn_up")
            x = x + self._linear(gated, w + "ffn_down")
        logits: Floats = self._output @ self._norm(x[-1], "output_norm")
        return logits

    def _linear(self, x: Floats, name: str) -> Floats:
        product: Floats = x @ self._weights[name + ".weight"].T
        return product

    def _heads(self, x: Floats, name: str) -> Floats:
        """A projection as [T, heads, D]."""
        return self._linear(x, name).reshape(len(x), -1, self.config.head_dim)

    def _norm(self, x: Floats, name: str) -> Floats:
        scale = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(self.config.norm_eps))
        normed: Floats = x / scale * self._weights[name + ".weight"]
        return normed

    def _rotation(self, start: int, count: int) -> tuple[Floats, Floats]:
        """Cosines and sines of the rotary embedding, each [T, 1, D/2]."""
        angles = np.arange(start, start + count)[:, None, None] * self._frequencies
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _rotate(x: Floats, cos: Floats, sin: Floats) -> Floats:
    """Rotary embedding of [T, heads, D]: the pairs are (0, 1), (2, 3), … as GGUF files have them."""
    even, odd = x[..., 0::2], x[..., 1::2]
    rotated = np.empty_like(x)
    rotated[..., 0::2] = even * cos - odd * sin
    rotated[..., 1::2] = even * sin + odd * cos
    return rotated


def _attend(q: Floats, k: Floats, v: Floats, start: int) -> Floats:
    """Causal attention of q [T, H, D] over k and v [S, G, D]; gives [T, H * D]."""
    new, _, width = q.shape
    seen, groups, _ = k.shape
    grouped = q.reshape(new, groups, -1, width).transpose(1, 2, 0, 3)  # [G, R, T, D]
    scores = grouped @ k.transpose(1, 2, 0)[:, None] / np.float32(np.sqrt(width))  # [G, R, T, S]
    future = np.arange(seen) > np.arange(start, start + new)[:, None]
    scores = np.where(future, np.float32(-np.inf), scores)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    mixed = weights @ v.transpose(1, 0, 2)[:, None]  # [G, R, T, D]
    attended: Floats = mixed.transpose(2, 0, 1, 3).reshape(new, -1)
    return attended


def _silu(x: Floats) -> Floats:
    # x * sigmoid(x), by tanh: it cannot overflow.
    activated: Floats = x * np.float32(0.5) * (np.float32(1) + np.tanh(x * np.float32(0.5)))
    return activated
