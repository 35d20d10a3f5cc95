"""The other process of every benchmark: it owns what is pulled, answers the references, or is both at once.

The main thread stays free to run Python in a loop, as a busy engine's does; commands are answered by another.
"""

from __future__ import annotations

import ctypes
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import llm_datadist as dd
from benchmarks.engines import OWNER_ID, Kv, Side, fill, pool_nbytes, views
from benchmarks.measure import Unavailable, timed
from benchmarks.references import in_calls
from llm_datadist.testing.owner import OwnerProcess, serve

SEED = 1
_keep: list[Any] = []  # what must live as long as this process
_sides: dict[int, tuple[Side, dd.Cache]] = {}
_caches: dict[tuple[Any, ...], list[int]] = {}


class Worker(OwnerProcess):
    """Starts one; a prefix runs it elsewhere (``ip netns exec ...``)."""

    def __init__(self, env: dict[str, str], prefix: Sequence[str] = ()) -> None:
        super().__init__([*prefix, sys.executable, "-m", "benchmarks.worker"], env=env)

    def call(self, do: str, **args: Any) -> Any:
        """See ``OwnerProcess.call``; what is unavailable there is unavailable here.

        Raises:
            Unavailable: The worker says so.
        """
        try:
            return super().call(do, **args)
        except RuntimeError as exc:
            _, found, reason = str(exc).partition(f"{Unavailable.__name__}: ")
            if found:
                raise Unavailable(reason) from exc
            raise


def memory(kv: dict[str, int]) -> list[int]:
    """Memory as callers have it: NumPy arrays (large pages where the system gives them), all written.

    Asked for again it is the same memory.
    """
    it = Kv(**kv)
    key = (it.tensors, it.tensor_nbytes)
    if key not in _caches:
        arrays = [np.empty(it.tensor_nbytes, np.uint8) for _ in range(it.tensors)]
        _keep.append(arrays)
        _caches[key] = [int(a.ctypes.data) for a in arrays]
        fill(_caches[key], it.tensor_nbytes, SEED)
    return _caches[key]


def own(
    kv: dict[str, int], backend: str, mode: str = "B", pool: bool = False, threads: int = 0,
    cluster_id: int = OWNER_ID, listen: str = "127.0.0.1:0",
) -> dict[str, Any]:  # fmt: skip
    """An engine with one cache, of registered or of pool memory; where it listens. It may be there already."""
    it = Kv(**kv)
    if cluster_id in _sides and not listen:
        return {}
    side = Side(cluster_id, backend, listen, mode, threads, pool_nbytes(it) if pool else 0)
    cache = side.allocate(it, SEED) if pool else side.register(it, memory(kv))
    _sides[cluster_id] = (side, cache)
    _keep.append(side)
    return {"address": side.dist.listen_address}


def link(cluster_id: int, peer_id: int, address: list[Any]) -> None:
    """Links an engine of this process with another one."""
    _sides[cluster_id][0].link(peer_id, address)


def pull(cluster_id: int, peer_id: int, kv: dict[str, int]) -> float:
    """Pulls; the seconds that it took."""
    side, cache = _sides[cluster_id]
    call = side.pull(cache, peer_id, Kv(**kv))
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def pulls(cluster_id: int, peer_id: int, kv: dict[str, int], calls: int) -> list[float]:
    """Pulls so often; the seconds of each."""
    side, cache = _sides[cluster_id]
    return list(timed(side.pull(cache, peer_id, Kv(**kv)), calls)())


def relinks(cluster_id: int, peer_id: int, address: list[Any], calls: int) -> list[float]:
    """Links and unlinks so often; the seconds of each pair of calls."""
    side, _ = _sides[cluster_id]

    def call() -> None:
        side.link(peer_id, address)
        side.unlink(peer_id)

    return list(timed(call, calls)())


def last_block(kv: dict[str, int], side: int) -> str:
    """The last block of the last tensor that a pull moves: of its source (0) or its destination (1)."""
    it = Kv(**kv)
    return peek(memory(kv)[-1] + it.lists()[side][-1] * it.block_nbytes, it.block_nbytes)


def library() -> str:
    """The file that the library was imported from."""
    return str(dd.__file__)


def peek(address: int, nbytes: int) -> str:
    """Bytes of this process."""
    return ctypes.string_at(address, nbytes).hex()


def answer_plain(address: int, nbytes: int) -> int:
    """Plain TCP: each byte that comes in is answered with these bytes; the port."""
    (data,) = views([address], nbytes)
    return _listen(lambda sock: sock.sendall(data.data))


def answer_scattered(kv: dict[str, int]) -> int:
    """The same with the blocks of ``kv``, gathered by ``sendmsg``; the port."""
    it = Kv(**kv)
    source, _ = it.lists()
    tensors = [view.data for view in views(memory(kv), it.tensor_nbytes)]
    blocks = [t[i * it.block_nbytes : (i + 1) * it.block_nbytes] for t in tensors for i in source]
    return _listen(lambda sock: in_calls(sock.sendmsg, blocks))


def _listen(reply: Callable[[socket.socket], object]) -> int:
    listener = socket.create_server(("127.0.0.1", 0))
    _keep.append(listener)

    def answer(sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while sock.recv(1):
            reply(sock)

    def accept() -> None:
        while True:
            sock, _ = listener.accept()
            threading.Thread(target=answer, args=(sock,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return int(listener.getsockname()[1])


def watch(path: str, offset: int) -> None:
    """Looks at one byte of a shared file from now on; ``seen`` tells when it had changed."""
    view = np.memmap(path, np.uint8, "r")[offset : offset + 1].data
    _seen.clear()

    def look() -> None:
        before = view[0]
        _looking.set()
        while view[0] == before:
            pass
        _seen.append(time.monotonic_ns())

    _looking.clear()
    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    _looking.wait()
    _watchers.append(thread)


def seen() -> int:
    """The instant of ``watch``, in ns of the monotonic clock, which all processes share."""
    _watchers.pop().join()
    return _seen[0]


_seen: list[int] = []
_watchers: list[threading.Thread] = []
_looking = threading.Event()
_busy, _spinning, _resting = threading.Event(), threading.Event(), threading.Event()


def busy(on: bool) -> None:
    """Whether the main thread runs Python in a loop; it does so, or not, when this returns."""
    (_busy.set if on else _busy.clear)()
    (_spinning if on else _resting).wait()


def _main() -> None:
    commands = (
        memory, own, link, pull, pulls, relinks, last_block, library, peek, answer_plain, answer_scattered, watch,
        seen, busy,
    )  # fmt: skip
    table: dict[str, Callable[..., Any]] = {command.__name__: command for command in commands}
    ended = threading.Event()

    def answer() -> None:
        serve(table)
        ended.set()
        _busy.set()

    threading.Thread(target=answer, daemon=True).start()
    while not ended.is_set():
        _resting.set()
        _busy.wait()
        _resting.clear()
        _spinning.set()
        while _busy.is_set() and not ended.is_set():
            pass
        _spinning.clear()


if __name__ == "__main__":
    _main()
