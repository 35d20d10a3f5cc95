"""What peers are told to do: functions run in a peer process, the world first."""

from __future__ import annotations

import gc
import hashlib
import logging
import mmap
import os
import time
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np

import llm_datadist as dd
from tests.support.arena import ARENA
from tests.support.memory import FILL, pattern
from tests.support.world import GAP, World, footprint, wait_until

Pairs = Sequence[tuple[int, int]]


# ---- the engine ---------------------------------------------------------------------------------


def options(
    mode: str = "A",
    backend: str = "auto",
    listen: str | None = None,
    timeout_ms: int | None = None,
    **more: str,
) -> dict[str, str]:
    """Option text for init. ``more``: names without the prefix "llm."."""
    values = {"llm.EnableCacheManager": "1", "llm.TransferBackend": backend}
    values["llm.EnableRemoteCacheAccessible"] = "1" if mode == "B" else "0"
    if backend == "shm":
        values["llm.HostMemPoolConfig"] = ARENA
    if listen is not None:
        values["llm.listenIpInfo"] = listen
    if timeout_ms is not None:
        values["llm.SyncKvCacheWaitTime"] = str(timeout_ms)
    values.update({f"llm.{name}": value for name, value in more.items()})
    return values


def up(w: World, cluster_id: int, values: dict[str, str], role: str = "MIX") -> Any:
    """Makes and initialises the engine; its listen address."""
    w.dist = dd.LLMDataDist(dd.LLMRole[role], cluster_id)
    w.dist.init(values)
    return w.dist.listen_address


def finalize(w: World) -> None:
    w.dist.finalize()


def ready(w: World) -> None:
    """Loads what is loaded lazily, so that no later time holds an import, and no other user has to."""
    for name in ("llm_datadist._engine.engine", "encodings.idna"):
        import_module(name)
    dd.LLMDataDist(dd.LLMRole.MIX, 1)
    pattern(0, 0, 8)
    gc.collect()
    gc.freeze()  # what stays for ever is not looked at again after every test
    w.baseline = footprint()


def reset(w: World) -> str:
    """Gives everything back; text that says what did not come back."""
    w.release()
    logging.disable(logging.NOTSET)
    gc.collect()
    if wait_until(lambda: footprint() == w.baseline, 3.0):
        return ""
    fds = [f"{fd}: {_target(fd)}" for fd in sorted(os.listdir("/proc/self/fd"), key=int)]
    return f"fds, threads are {footprint()}, were {w.baseline}: {fds}"


def _target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return "?"


def resources(w: World) -> tuple[int, int]:
    return footprint()


def rss_nbytes(w: World) -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


def cluster(remote_id: int, address: tuple[Any, int] | None = None) -> dd.LLMClusterInfo:
    info = dd.LLMClusterInfo()
    info.remote_cluster_id = remote_id
    info.append_local_ip_info("127.0.0.1", 0)
    if address is not None:
        info.append_remote_ip_info(*address)
    return info


def link(w: World, remotes: Sequence[tuple[int, tuple[Any, int]]], timeout: int = 3000) -> Any:
    """link_clusters to (cluster id, address) pairs."""
    return w.dist.link_clusters([cluster(i, a) for i, a in remotes], timeout)


def unlink(w: World, ids: Sequence[int], timeout: int = 3000, force: bool = False) -> Any:
    return w.dist.unlink_clusters([cluster(i) for i in ids], timeout, force)


def links(w: World) -> list[tuple[int, str, str]]:
    return [(i.cluster_id, i.transport, str(i.state)) for i in w.dist.links()]


def check_link(w: World, remote_id: int) -> None:
    w.dist.check_link_status(remote_id)


# ---- memory and caches ----------------------------------------------------------------------------


def make(
    w: World,
    name: str,
    *,
    tensors: int = 2,
    dim0: int = 8,
    stride: int = 1024,
    seed: int | None = None,
    skew: int = 0,
    placement: str = "DEVICE",
    address: int = 0,
    gap: int = GAP,
    own: bool = False,
) -> list[int]:
    """Memory for a cache: patterned with a seed (a source) or 0xA5 (a destination). Its tensor addresses."""
    held = w.hold(name, tensors, dim0 * stride, skew, address, gap, own)
    held.desc = dd.CacheDesc(tensors, [dim0, stride], dd.DataType.DT_UINT8, dd.Placement[placement])
    held.fill(seed)
    return held.addresses


def blocks_cache(
    w: World, name: str, *, model_id: int | None = None, accessible: Any = None, **memory: Any
) -> int:
    """Makes (unless it is there) and registers a blocks cache; its id."""
    if name not in w.held:
        make(w, name, **memory)
    held = w.held[name]
    key = None if model_id is None else dd.BlocksCacheKey(0, model_id)
    manager = w.dist.cache_manager
    held.cache = manager.register_blocks_cache(held.desc, held.addresses, key, accessible)
    return int(held.cache.cache_id)


def slot_cache(
    w: World, name: str, *, keys: Sequence[tuple[int, int]] = (), accessible: Any = None, **memory: Any
) -> int:
    """Makes (unless it is there) and registers a contiguous cache with (req_id, model_id) keys; its id."""
    if name not in w.held:
        make(w, name, **memory)
    held = w.held[name]
    cache_keys = [dd.CacheKey(0, req_id, model_id) for req_id, model_id in keys]
    manager = w.dist.cache_manager
    held.cache = manager.register_cache(held.desc, held.addresses, cache_keys, accessible)
    return int(held.cache.cache_id)


def unregister(w: World, name: str) -> None:
    w.dist.cache_manager.unregister_cache(w.held[name].cache.cache_id)


def unmap(w: World, name: str) -> int:
    """Gives the memory back to the system; its address."""
    held = w.held.pop(name)
    address = held.mapping.address
    held.mapping.close()
    return address


def refill(w: World, name: str, seed: int | None) -> None:
    w.held[name].fill(seed)


# ---- transfers --------------------------------------------------------------------------------------


def pull_blocks(w: World, key: Any, name: str, src: Any, dst: Any, **more: Any) -> None:
    w.dist.cache_manager.pull_blocks(key, w.held[name].cache, src, dst, **more)


def pull_cache(w: World, key: Any, name: str, *args: Any, **more: Any) -> None:
    w.dist.cache_manager.pull_cache(key, w.held[name].cache, *args, **more)


def push_blocks(w: World, key: Any, name: str, src: Any, dst: Any, **more: Any) -> None:
    w.dist.cache_manager.push_blocks(key, w.held[name].cache, src, dst, **more)


def push_cache(w: World, key: Any, name: str, *args: Any, **more: Any) -> None:
    w.dist.cache_manager.push_cache(key, w.held[name].cache, *args, **more)


def pull_loop(w: World, key: Any, name: str, src: Any, dst: Any, flag: str) -> tuple[int, float]:
    """Pulls until ``raise_flag``; how many, and the longest in seconds."""
    count, longest = 0, 0.0
    while not w.extras.get(flag):
        began = time.monotonic()
        pull_blocks(w, key, name, src, dst)
        longest = max(longest, time.monotonic() - began)
        count += 1
    return count, longest


def raise_flag(w: World, flag: str) -> None:
    w.extras[flag] = True


# ---- looking --------------------------------------------------------------------------------------


def digest(w: World, name: str) -> str:
    return hashlib.blake2b(w.held[name].whole()).hexdigest()


def unchanged(w: World, name: str) -> str:
    """Empty text when the whole memory is still 0xA5."""
    return _difference(w, name, np.full(w.held[name].mapping.nbytes, FILL, np.uint8))


def untouched_source(w: World, name: str, seed: int) -> str:
    """Empty text when a source still has its pattern."""
    held = w.held[name]
    want = np.full(held.mapping.nbytes, FILL, np.uint8)
    for t in range(held.tensors):
        start = held.starts[t]
        want[start : start + held.tensor_nbytes] = pattern(seed, t, held.tensor_nbytes)
    return _difference(w, name, want)


def compare(
    w: World,
    name: str,
    *,
    seed: int,
    src_tensor_nbytes: int,
    pieces: Sequence[tuple[Any, Any, int]],
    tensors: Pairs | None = None,
) -> str:
    """Holds the whole destination to what it must be: pieces of the source, 0xA5 everywhere else.

    Args:
        w: The world.
        name: The destination.
        seed: The pattern of the source.
        src_tensor_nbytes: Bytes of one source tensor.
        pieces: (source offsets, destination offsets, nbytes) within each tensor.
        tensors: (destination, source) tensor numbers; None = all, by number.

    Returns:
        Empty text, or what differs first.
    """
    held = w.held[name]
    want = np.full(held.mapping.nbytes, FILL, np.uint8)
    for dst_tensor, src_tensor in tensors if tensors is not None else [(t, t) for t in range(held.tensors)]:
        source = pattern(seed, src_tensor, src_tensor_nbytes)
        start = held.starts[dst_tensor]
        target = want[start : start + held.tensor_nbytes]
        for src_offsets, dst_offsets, nbytes in pieces:
            _place(source, target, np.atleast_1d(src_offsets), np.atleast_1d(dst_offsets), nbytes)
    return _difference(w, name, want)


def _place(source: Any, target: Any, src_offsets: Any, dst_offsets: Any, nbytes: int) -> None:
    whole = nbytes and not (src_offsets % nbytes).any() and not (dst_offsets % nbytes).any()
    if len(src_offsets) > 4 and whole:
        rows_from = source[: len(source) // nbytes * nbytes].reshape(-1, nbytes)
        rows_to = target[: len(target) // nbytes * nbytes].reshape(-1, nbytes)
        rows_to[dst_offsets // nbytes] = rows_from[src_offsets // nbytes]
        return
    for a, b in zip(src_offsets.tolist(), dst_offsets.tolist(), strict=True):
        target[b : b + nbytes] = source[a : a + nbytes]


def _difference(w: World, name: str, want: Any) -> str:
    got = w.held[name].whole()
    if np.array_equal(got, want):
        return ""
    bad = np.flatnonzero(got != want)
    at = int(bad[0])
    tensor = next((t for t in reversed(range(w.held[name].tensors)) if w.held[name].starts[t] <= at), 0)
    return (
        f"{name}: {len(bad)} of {len(want)} bytes differ, first at tensor {tensor} offset "
        f"{at - w.held[name].starts[tensor]}: {got[at]:#x} instead of {want[at]:#x}, last at {int(bad[-1])}"
    )


def busy(w: World) -> int:
    """Calls of this engine that are under way, and reads of its memory that peers have announced."""
    state = w.dist._engine._state
    with state.lock:
        return len(state.flights.where(lambda f: True)) + len(state.leases.all())


# ---- logs -------------------------------------------------------------------------------------------


class _Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.records: list[tuple[str, str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append((record.name, record.levelname, record.getMessage()))

    def close(self) -> None:
        logger = logging.getLogger("llm_datadist")
        logger.removeHandler(self)
        logger.setLevel(logging.NOTSET)
        super().close()


def watch_logs(w: World) -> None:
    handler = _Records()
    logger = logging.getLogger("llm_datadist")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    w.extras["logs"] = handler


def log_records(w: World, level: str | None = None) -> list[tuple[str, str, str]]:
    """(logger, level, text) since ``watch_logs`` or the last call."""
    handler = w.extras["logs"]
    taken, handler.records = handler.records, []
    return [r for r in taken if level is None or r[1] == level]


def pause(seconds: float) -> None:
    """Time in which something late would show; never a way to wait for something."""
    time.sleep(seconds)


def at_instant(w: World, instant: float, func: Any, *args: Any) -> Any:
    """Runs ``func`` at an instant of the monotonic clock, which all processes share."""
    time.sleep(max(0.0, instant - time.monotonic()))
    return func(w, *args)
