"""Pairs for transport ``shm``: an owner process whose memory is shared, and a reader."""

from __future__ import annotations

import base64
import ctypes
import mmap
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from llm_datadist._core.segments import Extents
from llm_datadist.devices.mapping import READ_WRITE, map_memory, unmap
from llm_datadist.devices.shared_memory import SharedArea, create_memfd, seal
from llm_datadist.testing.owner import Memory, OwnerProcess, pattern, serve
from llm_datadist.transports import shm_read
from llm_datadist.transports.movers import Movers
from llm_datadist.transports.seam import PeerEndpoint
from llm_datadist.transports.shm import ShmChannel, ShmTransport
from tests.support import other_user
from tests.support.local_pair import PROOF, Loop, nothing
from tests.support.memory import PAGE
from tests.support.world import wait_until

MIB = 1 << 20
FILLED_NBYTES = 1 << 30
SPARSE_NBYTES = 12 << 30


class Shared:
    """A mapping of ours that readers may have, sparse until it is touched."""

    def __init__(self, nbytes: int) -> None:
        self._fd = create_memfd("test", nbytes)
        address = map_memory(None, nbytes, READ_WRITE, mmap.MAP_SHARED, self._fd)
        assert not seal(self._fd)
        self.area = SharedArea(address, nbytes, self._fd)

    def view(self, at: int = 0, nbytes: int | None = None) -> NDArray[np.uint8]:
        size = self.area.nbytes - at if nbytes is None else nbytes
        return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(self.area.address + at))

    def close(self) -> None:
        unmap(self.area.address, self.area.nbytes)
        os.close(self._fd)


class SharedMemory(Memory):
    """An owner's memory, all of it within reach of readers.

    Sealed pages cannot be given back: what the tests fill is used again once all of it is unmapped.
    """

    def __init__(self) -> None:
        super().__init__()
        filled, sparse = Shared(FILLED_NBYTES), Shared(SPARSE_NBYTES)
        self.areas = [filled.area, sparse.area]
        self._filled, self._sparse = filled.area.address, sparse.area.address
        self._in_use: set[int] = set()

    def allocate(self, sizes: Sequence[int], seed: int) -> list[int]:
        addresses = []
        for i, size in enumerate(sizes):
            addresses.append(self._filled)
            self._filled += max(1, -(-size // PAGE)) * PAGE
            self.write(addresses[-1], pattern(seed + i, size).tobytes())
        self._in_use.update(addresses)
        return addresses

    def map_sparse(self, nbytes: int) -> int:
        self._sparse += -(-nbytes // PAGE) * PAGE
        return self._sparse - -(-nbytes // PAGE) * PAGE

    def unmap(self, address: int, nbytes: int) -> None:
        self._in_use.discard(address)
        if not self._in_use:
            self._filled = self.areas[0].address

    def beyond(self) -> int:
        """Memory of the owner that no reader can map."""
        return super().map_sparse(MIB)


class Reader(ShmTransport):
    """A transport that only reads: it hears what owners answer, and leaves its own readers in the queue.

    Args:
        areas: Of its own.
        movers: Who helps.
        random_bytes: Source of secrets.
        deaf: Answers are left alone until ``memory.hear()`` is called.
    """

    def __init__(
        self,
        areas: Sequence[SharedArea],
        movers: Movers,
        random_bytes: Callable[[int], bytes] = secrets.token_bytes,
        *,
        deaf: bool = False,
    ) -> None:
        self._loop: Loop | None = None
        self._deaf = deaf
        super().__init__(areas, movers, self._adopt, self._drop, random_bytes)

    def _adopt(self, sock: socket.socket, callback: Callable[[], None]) -> None:
        if self._deaf or sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return
        if self._loop is None:
            self._loop = Loop()
        self._loop.adopt(sock, callback)

    def _drop(self, sock: socket.socket) -> None:
        if self._loop is not None:
            self._loop.drop(sock)

    def close(self) -> None:
        super().close()
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.close()


def transport(
    areas: Sequence[SharedArea],
    movers: Movers | None = None,
    loop: Loop | None = None,
    random_bytes: Callable[[int], bytes] = secrets.token_bytes,
) -> ShmTransport:
    if loop is None:
        return Reader(areas, movers or Movers(0), random_bytes)
    return ShmTransport(areas, movers or Movers(0), loop.adopt, loop.drop, random_bytes)


def endpoint(blob: bytes) -> PeerEndpoint:
    return PeerEndpoint(1, blob, b"", None, nothing, PROOF)


class ShmOwner(OwnerProcess):
    """An owner process that can be read with ``shm``."""

    def __init__(self, as_nobody: bool = False, **popen: Any) -> None:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        super().__init__([sys.executable, __file__, *(["nobody"] if as_nobody else [])], env=env, **popen)
        self.endpoint = endpoint(base64.b64decode(self.call("endpoint")))

    def source(self, extents: Extents) -> Extents:
        return extents

    def beyond(self) -> int:
        return int(self.call("beyond"))


class ShmPair(ShmOwner):
    """A ``testing.transports.PartialPair``.

    Args:
        threads: Who read, the caller included.
        by_kernel: Whether the reader may use process_vm_readv on itself.
        checked_nbytes: Up to which size it is preferred for a destination of no pool.
    """

    def __init__(self, threads: int, by_kernel: bool = True, checked_nbytes: int = 16 << 20) -> None:
        super().__init__()
        self._checked = mock.patch.object(shm_read, "CHECKED_NBYTES", checked_nbytes)
        self._checked.start()
        self._movers = Movers(threads - 1)
        self._movers.offer(nothing, threads - 1)  # starts them now, before a test counts its threads
        self._own = Shared(MIB)
        self.reader = transport([self._own.area], self._movers)
        if not by_kernel:
            self.reader._by_kernel = False
        self.channel: ShmChannel = self.reader.open(self.endpoint, deadline=0)
        settle(self.channel)

    def close(self) -> None:
        self._checked.stop()
        self.reader.close()
        self._own.close()
        self._movers.close()
        super().close()


def settle(channel: ShmChannel) -> None:
    """Until the owner has answered and the control thread has let go of the channel, however busy the machine."""
    assert channel.settle(deadline=time.monotonic() + 30)
    assert wait_until(lambda: not channel.memory._users, 30)


def _main() -> None:
    if "nobody" in sys.argv:
        other_user.become()
    memory = SharedMemory()
    owned = transport(memory.areas, loop=Loop())
    serve(
        {
            "endpoint": lambda: base64.b64encode(owned.endpoint(PROOF)).decode(),
            "allocate": memory.allocate,
            "map_sparse": memory.map_sparse,
            "write": lambda address, data: memory.write(address, bytes.fromhex(data)),
            "unmap": memory.unmap,
            "beyond": memory.beyond,
            "fork": lambda: _fork(owned),
        }
    )


def _fork(owned: ShmTransport) -> int:
    """A child that lives until it is killed, as one forked by an engine's process does."""
    pid = os.fork()
    if not pid:
        owned.close_after_fork()
        for fd in (0, 1):
            os.close(fd)
        signal.pause()
    return pid


if __name__ == "__main__":
    _main()
