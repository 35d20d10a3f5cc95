"""The prefill process: computes the prompt's KV and lets decode have it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from threading import Event

from examples.demo.lines import Lines, Message
from examples.demo.role import kv_digest, load_model, make_cache, make_engine, run
from examples.demo.settings import BLOCK_SIZE, DECODE_ID, PREFILL_BLOCKS, PREFILL_ID, Settings
from examples.llama import Llama, PagedCache, Sampler, Tokenizer, decode, prefill
from llm_datadist import (
    BlocksCacheKey,
    Cache,
    LayerSynchronizer,
    LLMDataDist,
    LLMRole,
    LLMStatusCode,
    TransferConfig,
    TransferWithCacheKeyConfig,
)


class ComputedLayers(LayerSynchronizer):
    """Tells the library when a layer's KV is complete; the model calls ``mark``."""

    def __init__(self, layers: int) -> None:
        self.marked_at = [0.0] * layers
        self._marked = [Event() for _ in range(layers)]

    def mark(self, layer: int) -> None:
        """The layer's KV is in the cache."""
        self.marked_at[layer] = time.monotonic()
        self._marked[layer].set()

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        """Waits for ``mark``; runs in a thread of the library."""
        return self._marked[layer_index].wait(None if timeout_in_millis is None else timeout_in_millis / 1000)


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt on its way."""

    model: Llama
    prompt: list[int]
    paged: PagedCache
    table: list[int]
    sampler: Sampler


def main(settings: Settings, start: Message, control: Lines, handoff: Lines, end: ExitStack) -> None:
    """Serves one prompt, then computes the same prompt alone, as the driver's reference."""
    datadist = make_engine(LLMRole.PROMPT, PREFILL_ID, settings, end, f"127.0.0.1:{settings.port}")
    address = datadist.listen_address
    handoff.send({"address": address})
    model, tokenizer = load_model(settings, control)
    paged, handle = make_cache(model, PREFILL_BLOCKS, datadist, PREFILL_ID, settings)
    prompt = tokenizer.chat(start["prompt"])
    job = Job(model, prompt, paged, paged.allocate(len(prompt)), Sampler(settings.seed))
    computed = ComputedLayers(model.config.layers)
    if settings.layerwise:
        _push_layers(job, computed, datadist, handle, settings, handoff)
    else:
        first = prefill(model, prompt, paged, job.table, job.sampler, computed.mark)
        handoff.send({"blocks": job.table, "prompt_length": len(prompt), "first_token": first})
    handoff.receive()  # decode has the blocks
    report = {
        "digest": kv_digest(paged, job.table),
        "marked_at": computed.marked_at,
        "reference": _in_one_process(job, settings.max_tokens, tokenizer),
    }
    datadist.cache_manager.unregister_cache(handle.cache_id)
    control.send({"event": "report", **report})


def _push_layers(
    job: Job,
    computed: ComputedLayers,
    datadist: LLMDataDist,
    handle: Cache,
    settings: Settings,
    handoff: Lines,
) -> None:
    """Computes the prompt while the layers that are done are on their way."""
    handoff.send({"prompt_length": len(job.prompt)})
    room = handoff.receive()  # where decode wants the KV
    task = datadist.cache_manager.transfer_cache_async(
        handle,
        computed,
        _destination(settings.mode, room["addresses"], job.model.config.layers),
        src_block_indices=job.table,
        dst_block_indices=room["blocks"],
        dst_block_memory_size=job.paged.block_nbytes,
    )
    first = prefill(job.model, job.prompt, job.paged, job.table, job.sampler, computed.mark)
    if task.synchronize() != LLMStatusCode.LLM_SUCCESS:
        raise task.exception() or RuntimeError("the layer-wise push failed without a reason")
    handoff.send({"first_token": first})


def _destination(
    mode: str, addresses: Sequence[int], layers: int
) -> list[TransferConfig] | list[TransferWithCacheKeyConfig]:
    """In managed mode the peer's tensors by address, in accessible mode its cache by key."""
    everything = range(layers)
    if mode == "managed":
        return [TransferConfig(DECODE_ID, addresses, everything)]
    return [TransferWithCacheKeyConfig(BlocksCacheKey(DECODE_ID), everything, everything)]


def _in_one_process(job: Job, max_tokens: int, tokenizer: Tokenizer) -> list[int]:
    """The same prompt from the start, in a cache that no other process has touched."""
    length = len(job.prompt)
    paged = PagedCache(job.model.config, PREFILL_BLOCKS, BLOCK_SIZE)
    table = paged.allocate(length + max_tokens)
    first = prefill(job.model, job.prompt, paged, table, job.sampler)
    return list(decode(job.model, first, length, paged, table, job.sampler, max_tokens, tokenizer.end))


if __name__ == "__main__":
    run(main)
