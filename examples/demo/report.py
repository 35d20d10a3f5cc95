"""What is said after the answer: is it right, what was moved, how, and how long did it take."""

from __future__ import annotations

from statistics import median

from examples.demo.lines import Message
from examples.demo.settings import Settings


def check(prefill: Message, decode: Message) -> list[str]:
    """What is wrong with the answer; nothing if it is what one process gives.

    The tokens are what counts for a user. The KV's digest sees also what does not show in these tokens: a
    damaged low bit, or an answer of one token, which prefill has computed alone.
    """
    faults = []
    split, alone = decode["tokens"], prefill["reference"]
    if split != alone:
        pairs = enumerate(zip(split, alone, strict=False))
        same = next((i for i, (a, b) in pairs if a != b), min(len(split), len(alone)))
        counts = f"{len(split)} split, {len(alone)} in one process"
        faults.append(f"the tokens differ from number {same + 1} on ({counts})")
    if decode["digest"] != prefill["digest"]:
        there, here = prefill["digest"][:12], decode["digest"][:12]
        faults.append(f"SHA-256 of the prompt's KV: {there}… in prefill, {here}… in decode")
    return faults


def lines(settings: Settings, prefill: Message, decode: Message) -> list[tuple[str, str]]:
    """The report, as (label, text)."""
    said = []
    if decode["damage"]:
        said.append(("corrupt", f"--corrupt flipped {decode['damage']}"))
    faults = check(prefill, decode)
    if faults:
        said += [("CHECK FAILED", fault) for fault in faults]
    else:
        count = len(decode["tokens"])
        said.append(("check", f"identical: the same prompt in one process gives the same {count} tokens,"))
        said.append(("", "and SHA-256 of the prompt's KV is the same on both sides"))
    said += _moved(settings, prefill, decode)
    said.append(("transport", decode["transport"]))
    said += [("", reason) for reason in decode["reasons"]]
    if settings.layerwise:
        said += _overlap(prefill["marked_at"], decode["layers_at"])
    return said


def _moved(settings: Settings, prefill: Message, decode: Message) -> list[tuple[str, str]]:
    blocks, tensors, block_nbytes = (decode[name] for name in ("blocks", "tensors", "block_nbytes"))
    nbytes = blocks * tensors * block_nbytes
    what = f"{nbytes:,} bytes of KV: {blocks} blocks x {tensors} tensors x {block_nbytes:,}"
    said = [("moved", f"{what} ({decode['prompt_length']} tokens)")]

    def speed(seconds: float) -> str:
        return f"{seconds * 1e3:.2f} ms, {nbytes / seconds / 1e9:.3g} GB/s"

    if settings.layerwise:
        seconds = decode["layers_at"][-1] - prefill["marked_at"][0]
        said.append(("time", f"{speed(seconds)} (transfer_cache_async, {settings.mode} mode;"))
        said.append(("", "from the first layer computed to the last arrived, so it is prefill's own pace)"))
    else:
        first, *more = decode["pull_seconds"]
        said.append(("time", f"{speed(first)} (pull_blocks, {settings.mode} mode)"))
        said.append(("", f"{speed(median(more))} (median of {len(more)} more pulls of the same blocks)"))
    return said


def _overlap(computed: list[float], arrived: list[float]) -> list[tuple[str, str]]:
    """Both processes read the same clock (CLOCK_MONOTONIC of the host)."""
    early = sum(there < later for there, later in zip(arrived[:-2], computed[2:], strict=True))
    count = len(computed) - 2
    said = [("overlap", f"layer i had arrived before layer i+2 was computed for {early} of {count} layers")]

    def at(instant: float) -> str:
        return f"{(instant - computed[0]) * 1e3:.1f} ms"

    for i in sorted({0, count // 4, count // 2, 3 * count // 4, count - 1}):
        times = f"computed at {at(computed[i])}, arrived at {at(arrived[i])}"
        said.append(("", f"layer {i}: {times}; layer {i + 2} computed at {at(computed[i + 2])}"))
    lag = (arrived[-1] - computed[-1]) * 1e3
    said.append(("", f"the last layer arrived {lag:.1f} ms after it was computed"))
    return said
