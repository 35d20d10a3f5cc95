"""Prompt in, tokens out: the two halves that disaggregated serving puts into two processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from examples.llama.model import Floats, LayerHook, Llama, PagedCache


@dataclass(frozen=True, slots=True)
class Sampler:
    """Greedy without a seed; with one, samples among the ``top_k`` likeliest tokens.

    The random numbers depend on seed and position alone, so that a sequence goes on in another process
    exactly as it would have gone on here, without any state of a generator being sent along.
    """

    seed: int | None = None
    temperature: float = 0.8
    top_k: int = 40

    def choose(self, logits: Floats, position: int) -> int:
        """The token at ``position``."""
        if self.seed is None:
            return int(np.argmax(logits))
        likeliest = np.argsort(-logits, kind="stable")[: self.top_k]
        noise = np.random.default_rng((self.seed, position)).gumbel(size=self.top_k)
        return int(likeliest[np.argmax(logits[likeliest] / self.temperature + noise[: len(likeliest)])])


def prefill(
    model: Llama,
    prompt: Sequence[int],
    cache: PagedCache,
    table: Sequence[int],
    sampler: Sampler,
    kv_written: LayerHook | None = None,
) -> int:
    """Puts the prompt's KV into the blocks of ``table``; returns the first token of the answer."""
    return sampler.choose(model.forward(prompt, 0, cache, table, kv_written), len(prompt))


def decode(
    model: Llama,
    first: int,
    prompt_length: int,
    cache: PagedCache,
    table: Sequence[int],
    sampler: Sampler,
    max_tokens: int,
    end: int,
) -> Iterator[int]:
    """The answer from its first token on; it needs the prompt's KV and length, not the prompt."""
    token = first
    for position in range(prompt_length, prompt_length + max_tokens):
        yield token
        if token == end or position == prompt_length + max_tokens - 1:
            return
        token = sampler.choose(model.forward([token], position, cache, table), position + 1)
