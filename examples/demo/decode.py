"""The decode process: gets the prompt's KV, never the prompt, and generates the answer."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from threading import Thread

import numpy as np

from examples.demo.lines import Lines, Message
from examples.demo.role import kv_digest, load_model, make_cache, make_engine, run
from examples.demo.settings import DECODE_BLOCKS, DECODE_ID, PREFILL_ID, Settings
from examples.llama import PagedCache, Sampler, TextStream, decode
from llm_datadist import (
    BlocksCacheKey,
    Cache,
    LinkFailedError,
    LLMClusterInfo,
    LLMDataDist,
    LLMRole,
    LLMStatusCode,
)

_LINK_TIMEOUT_MS = 10_000
_LOOK_INTERVAL = 0.0002
_MORE_PULLS = 9


@dataclass(frozen=True, slots=True)
class Arrived:
    """The prompt's KV in this process, and how it came: pulled in so many seconds (and again), or layer by layer."""

    prompt_length: int
    first_token: int
    table: list[int]
    blocks: list[int]
    pull_seconds: list[float] = field(default_factory=list)
    layers_at: list[float] = field(default_factory=list)


def main(settings: Settings, start: Message, control: Lines, handoff: Lines, end: ExitStack) -> None:
    """Generates one answer."""
    datadist = make_engine(LLMRole.DECODER, DECODE_ID, settings, end)
    model, tokenizer = load_model(settings, control)
    paged, handle = make_cache(model, DECODE_BLOCKS, datadist, DECODE_ID, settings)
    _link(datadist, *handoff.receive()["address"])
    if settings.layerwise:
        kv = _receive_layers(paged, settings.max_tokens, handoff)
    else:
        kv = _pull(datadist, handle, paged, settings.max_tokens, handoff)
    handoff.send({"received": True})
    (link,) = datadist.links()
    damage = _flip_one_bit(paged, kv) if settings.corrupt else None
    digest = kv_digest(paged, kv.blocks)
    tokens: list[int] = []
    stream = TextStream(tokenizer)
    sampler = Sampler(settings.seed)
    # Damaged KV may overflow: what comes of it is for the check to say, not for a warning of NumPy.
    with np.errstate(all="ignore" if settings.corrupt else "warn"):
        for token in decode(
            model,
            kv.first_token,
            kv.prompt_length,
            paged,
            kv.table,
            sampler,
            settings.max_tokens,
            tokenizer.end,
        ):
            tokens.append(token)
            control.send({"event": "text", "text": stream.add(token)})
    report = {
        "tokens": tokens,
        "digest": digest,
        "damage": damage,
        "blocks": len(kv.blocks),
        "tensors": len(paged.tensors),
        "block_nbytes": paged.block_nbytes,
        "prompt_length": kv.prompt_length,
        "pull_seconds": kv.pull_seconds,
        "layers_at": kv.layers_at,
        "transport": link.transport,
        "reasons": link.reasons,
    }
    datadist.cache_manager.unregister_cache(handle.cache_id)
    control.send({"event": "report", **report})


def _link(datadist: LLMDataDist, host: str, port: int) -> None:
    peer = LLMClusterInfo()
    peer.remote_cluster_id = PREFILL_ID
    peer.append_local_ip_info("127.0.0.1", 0)
    peer.append_remote_ip_info(host, port)
    code, _ = datadist.link_clusters([peer], _LINK_TIMEOUT_MS)
    if code != LLMStatusCode.LLM_SUCCESS:
        reason = datadist.link_error(PREFILL_ID) or str(code)
        raise LinkFailedError(f"no link to prefill at {host}:{port}: {reason}")


def _pull(
    datadist: LLMDataDist, handle: Cache, paged: PagedCache, max_tokens: int, handoff: Lines
) -> Arrived:
    """Reads the blocks that prefill names into blocks of our own."""
    offer = handoff.receive()
    length = offer["prompt_length"]
    table = paged.allocate(length + max_tokens)
    blocks = table[: len(offer["blocks"])]
    seconds = []
    for _ in range(1 + _MORE_PULLS):  # once is enough; the others show what a warm link does
        began = time.monotonic()
        datadist.cache_manager.pull_blocks(
            BlocksCacheKey(PREFILL_ID), handle, src_blocks=offer["blocks"], dst_blocks=blocks
        )
        seconds.append(time.monotonic() - began)
    return Arrived(length, offer["first_token"], table, blocks, seconds)


def _receive_layers(paged: PagedCache, max_tokens: int, handoff: Lines) -> Arrived:
    """Makes room, tells prefill where, and looks on as the layers come in."""
    length = handoff.receive()["prompt_length"]
    table = paged.allocate(length + max_tokens)
    blocks = table[: paged.blocks_for(length)]
    for tensor in paged.tensors:
        tensor[blocks] = np.nan  # no KV is NaN: a layer has arrived when none is left
    layers_at: list[float] = []
    onlooker = Thread(target=_note_arrivals, args=(paged, blocks, layers_at), daemon=True)
    onlooker.start()
    handoff.send({"blocks": blocks, "addresses": paged.addresses})
    first = handoff.receive()["first_token"]
    onlooker.join()
    return Arrived(length, first, table, blocks, layers_at=layers_at)


def _note_arrivals(paged: PagedCache, blocks: list[int], layers_at: list[float]) -> None:
    """Watches the memory itself, so that the times do not rest on what the library says about it."""
    for layer in range(len(paged.tensors) // 2):
        while any(np.isnan(paged.tensors[2 * layer + i][blocks]).any() for i in (0, 1)):
            time.sleep(_LOOK_INTERVAL)
        layers_at.append(time.monotonic())


def _flip_one_bit(paged: PagedCache, kv: Arrived) -> str:
    """Damages V of the first layer at the last prompt token; every later token attends to that.

    The bit is the highest of the float's exponent: the value changes by a factor of 2**128, which no small
    attention weight hides. A low bit could go unnoticed in the tokens, which is why the KV's digest is
    compared as well.
    """
    position = kv.prompt_length - 1
    block, offset = kv.table[position // paged.block_size], position % paged.block_size
    values = paged.tensors[1][block, offset, 0, :1]
    before = float(values[0])
    values.view(np.uint8)[3] ^= 0x40
    return (
        f"one bit of one byte of block {block}, V of layer 0 at the last prompt token: "
        f"{before:.4g} became {float(values[0]):.4g}"
    )


if __name__ == "__main__":
    run(main)
