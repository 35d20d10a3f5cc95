"""Two TCP transports and memory on both sides: in one process, or with the owner in a process of its own."""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from llm_datadist._core.segments import Extents, Segments
from llm_datadist.testing.owner import OwnerProcess
from llm_datadist.testing.stream_owner import ExtentsSource, Port, encode_extents, first_frame
from llm_datadist.transports._sockets import Iovecs
from llm_datadist.transports.seam import PeerEndpoint, Progress
from llm_datadist.transports.tcp import TcpTransport
from llm_datadist.transports.tcp_channel import StripedRead, TcpChannel, TcpRead
from llm_datadist.transports.tcp_frames import encode_data

U8 = NDArray[np.uint8]
CALL_S = 10.0


def extents_of(memory: U8, blocks: Sequence[int] | None = None, block_nbytes: int = 0) -> Extents:
    """All of a 2-dim array, row by row as tensors, or these blocks of each row."""
    bases = np.array([row.ctypes.data for row in memory], np.uint64)
    nbytes = block_nbytes or memory.shape[1]
    offsets = np.array([0] if blocks is None else blocks, np.uint64) * np.uint64(nbytes)
    return Extents.of(bases, offsets, np.full(len(offsets), nbytes, np.uint64))


_alive: list[U8] = []  # addresses do not keep an array alive


def memory_of(tensors: int, nbytes: int, seed: int | None) -> U8:
    """Random bytes, or 0xA5 everywhere for a destination (seed None); stays until ``free_memory``."""
    if seed is None:
        memory: U8 = np.full((tensors, nbytes), 0xA5, np.uint8)
    else:
        memory = np.random.default_rng(seed).integers(0, 256, (tensors, nbytes), dtype=np.uint8)
    _alive.append(memory)
    return memory


def free_memory() -> None:
    """Frees what ``memory_of`` made; nothing may read or write it any more."""
    _alive.clear()


class Rig:
    """Reader and owner in this process; ``reader_dials`` says who dialled the link."""

    def __init__(self, *, reader_dials: bool = True, connections: int = 0, stripes: int = 0) -> None:
        self.source = ExtentsSource()
        self.owner = TcpTransport(self.source, first_frame, connections, stripes)
        self.reader = TcpTransport(ExtentsSource(), first_frame, connections, stripes)
        dialled = self.owner if reader_dials else self.reader
        self.port = Port(dialled)
        self.token = secrets.token_bytes(16)
        self.asked: list[int] = []
        self._closed = False
        there, nowhere = self.port.address, None
        self.owner_channel = self._open(self.owner, nowhere if reader_dials else there)
        self.channel = self._open(self.reader, there if reader_dials else nowhere)

    def _open(self, transport: TcpTransport, address: tuple[str, int] | None) -> TcpChannel:
        peer = PeerEndpoint(1, b"", self.token, address, self._ask)
        return transport.open(peer, deadline=time.monotonic() + CALL_S)

    def _ask(self, count: int) -> None:
        self.asked.append(count)
        self.owner_channel.dial_for_peer(count)

    def read(self, source: Extents, destination: Extents, *, timeout_s: float = CALL_S) -> Progress:
        """One read, to its end."""
        plan = Segments(encode_extents(source), destination)
        return self.channel.read(plan).wait(deadline=time.monotonic() + timeout_s)

    def close(self) -> None:
        """Ends everything. Idempotent."""
        self.reader.close()
        self.owner.close()
        if not self._closed:
            self.port.close()
        self._closed = True


class ProcessRig:
    """The reader here, the owner in another process (a ``testing.transports.Pair``)."""

    def __init__(self, connections: int = 0, stripes: int = 0) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self.owner = OwnerProcess(
            [sys.executable, "-m", "llm_datadist.testing.stream_owner"], env=environment
        )
        self.transport = TcpTransport(ExtentsSource(), first_frame, connections, stripes)
        token = secrets.token_bytes(16)
        host, port = self.owner.call("listen", token=token.hex())
        peer = PeerEndpoint(1, b"", token, (host, port), lambda count: None)
        self.channel = self.transport.open(peer, deadline=time.monotonic() + CALL_S)
        self.allocate, self.map_sparse = self.owner.allocate, self.owner.map_sparse
        self.write, self.unmap = self.owner.write, self.owner.unmap
        self.stop, self.resume, self.kill = self.owner.stop, self.owner.resume, self.owner.kill

    def source(self, extents: Extents) -> bytes:
        """The selector that names these ranges."""
        return encode_extents(extents)

    def close(self) -> None:
        """Ends both sides."""
        self.transport.close()
        self.owner.close()


def sends_at_most(nbytes: int) -> Callable[[Iovecs, int], int]:
    """An ``Iovecs.send_now`` of a socket that takes so many bytes of every answer, and then is full."""

    def send_some(iovecs: Iovecs, fd: int) -> int:
        table = iovecs._table[iovecs._head : iovecs._tail]
        whole = b"".join(ctypes.string_at(int(address), int(size)) for address, size in table)
        sent = os.write(fd, whole[:nbytes]) if nbytes else 0
        iovecs.advance(sent)
        return sent

    return send_some


MakeRig = Callable[..., Rig]


class Trickle:
    """An owner that speaks the protocol as far as it is told: accepts, and sends these bytes."""

    def __init__(self, *answers: bytes) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        self.connections = 0
        self._held: list[socket.socket] = []
        self._answers = answers
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._held.append(sock)
            sock.recv(1 << 16)
            for answer in self._answers:
                sock.sendall(answer)

    def open(self, transport: TcpTransport) -> TcpChannel:
        peer = PeerEndpoint(1, b"", b"t" * 16, self.address, lambda count: None)
        self.channel = transport.open(peer, deadline=time.monotonic() + 1)
        return self.channel

    def send(self, data: bytes) -> None:
        """More bytes for whoever still reads."""
        for sock in self._held:
            with contextlib.suppress(OSError):
                sock.sendall(data)

    def hang_up(self) -> None:
        for sock in self._held:
            sock.close()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        self.hang_up()


def silent(reader: TcpTransport, sent: bytes = b"") -> tuple[Trickle, TcpRead | StripedRead, U8]:
    """A read that gets this far and no further."""
    owner = Trickle(encode_data(1, 5000) + sent)
    destination = memory_of(1, 5000, None)
    return owner, owner.open(reader).read(Segments(b"x", extents_of(destination))), destination


def in_thread(call: Callable[[], Progress]) -> Callable[[], Progress]:
    """Starts the call in a thread; calling the result joins it and gives what it returned."""
    results: list[Progress] = []
    thread = threading.Thread(target=lambda: results.append(call()), daemon=True)
    thread.start()

    def join() -> Progress:
        thread.join(CALL_S)
        return results[0]

    return join
