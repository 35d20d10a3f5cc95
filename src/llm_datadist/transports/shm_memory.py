"""Transport ``shm``, the reader's side: the peer's areas as they are mapped here, and whether it still lives.

Strategy: the owner answers from its control thread, for which ours must not wait (both may be opening at
once). Ours takes the answer in whenever it comes: no interrupt of a caller can lose it half-way. Callers
wait for it, only shortly. An answer for which this process has no descriptors or memory stays in the queue of its
socket, and is looked at again until it has them.
Invariants: what is mapped is read-only and sealed, so the peer can neither take it away under a copy
(SIGBUS) nor be harmed by us; it stays mapped while a read holds it. A forked child has none of it.
Threads: every method may be called from any thread, but ``hear`` from one at a time.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import select
import socket
import threading
import time
from array import array
from collections.abc import Sequence

from llm_datadist._core import limits
from llm_datadist._shortages import is_shortage, reason_of, start_thread
from llm_datadist.devices.mapping import advise, map_memory, unmap
from llm_datadist.devices.shared_memory import is_safe_to_map
from llm_datadist.status import OutOfMemoryError
from llm_datadist.transports import _libc
from llm_datadist.transports._meeting import AdoptReader, DropReader, end
from llm_datadist.transports._one_sided import Owner
from llm_datadist.transports.seam import Fault, FaultKind
from llm_datadist.transports.shm_areas import Areas
from llm_datadist.transports.shm_owner import GRANTED

ANSWER_S = 0.1  # from ``open``; a few thread switches at the owner. A late answer is still taken
_PAUSE_S = 0.1  # between two looks whether there is room for it
_QUICK_NBYTES = 64 << 20  # unmapped in a few milliseconds
_LOOK = int(socket.MSG_CMSG_CLOEXEC) | int(socket.MSG_DONTWAIT) | int(socket.MSG_PEEK)
_TRUNCATED = int(socket.MSG_CTRUNC)
_NONE = Areas(())


class _Words:
    """The peer's slab as it is mapped here, for as long as anybody looks into it.

    So that a look needs no lock: whoever has the object has the mapping.
    """

    __slots__ = ("_address", "_nbytes", "_pid", "array", "low")

    def __init__(self, low: int, address: int, nbytes: int) -> None:
        self._address = address
        self._nbytes = nbytes
        self._pid = os.getpid()
        self.low = low  # where the slab begins for the peer
        self.array = (ctypes.c_uint64 * (nbytes // 8)).from_address(address)

    def __del__(self) -> None:
        """Unmaps it, but not in a forked child, which never had it."""
        if getattr(self, "_pid", 0) == os.getpid():  # 0: it was not taken over
            unmap(self._address, self._nbytes)


class _Loop:
    """Who keeps the memory as long as the control loop has the socket."""


_LOOP = _Loop()


class _Latch:
    """Something that happens once. No lock is shared, so that no interrupt of one who waits can leave it taken.

    (``threading.Event`` has one, which an interrupted ``wait`` may keep; ``set`` would hang then.)
    """

    __slots__ = ("_waiting", "happened")

    def __init__(self) -> None:
        self.happened = False
        self._waiting: list[threading.Lock] = []

    def wait(self, deadline: float) -> None:
        """Until it has happened, or the deadline."""
        if self.happened:
            return
        mine = threading.Lock()
        mine.acquire()
        self._waiting.append(mine)
        try:
            if not self.happened:
                mine.acquire(timeout=min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX))
        finally:
            with contextlib.suppress(ValueError):
                self._waiting.remove(mine)

    def happen(self) -> None:
        """Wakes all who wait. Idempotent."""
        self.happened = True
        with contextlib.suppress(IndexError):
            while True:
                self._waiting.pop().release()


class PeerMemory(Owner):
    """Areas of one peer.

    Args:
        sock: The connection to it, on which the proof has been shown.
        announced: (address, nbytes) of each area, as the handshake told it.
        drop_reader: Takes the socket out of the control loop.
    """

    __slots__ = (
        "_announced", "_answer_by", "_answered", "_drop_reader", "_listening", "_looked", "_mapped", "_sock", "areas",
        "cause", "reason", "words",
    )  # fmt: skip

    def __init__(
        self, sock: socket.socket, announced: Sequence[tuple[int, int]], drop_reader: DropReader
    ) -> None:
        super().__init__()
        self._sock = sock
        self._announced = announced
        self._answer_by = time.monotonic() + ANSWER_S
        self._answered = _Latch()
        self._looked = _Latch()  # at what has come, the next time
        self._drop_reader = drop_reader
        self._listening = False
        self._mapped: list[tuple[int, int]] = []
        self.areas = _NONE
        self.words: _Words | None = None
        self.cause: OSError | MemoryError | None = None
        self.reason = "the peer has not sent its memory yet: it is stopped, or too busy to answer"

    def listen(self, adopt_reader: AdoptReader) -> None:
        """Has the control thread take the answer in."""
        if self.keep(_LOOP):
            self._listening = True
            adopt_reader(self._sock, self.hear)

    def hear(self) -> float:
        """Takes the answer if it has come; once is enough. For how long nobody must look again, in seconds."""
        short = False
        with self.hold() as held:
            if held and not self._answered.happened:
                short = self._receive()
        if not held or self._answered.happened:
            self._stop_listening()
        return _PAUSE_S if short else 0.0

    def settle(self) -> Areas:
        """The areas; none of them as long as the peer has not sent them, or when it does not. Only while held."""
        if not self._answered.happened:
            self._answered.wait(self._answer_by)
        return self.areas

    def settle_by(self, deadline: float) -> bool:
        """Waits for the answer; whether it has come, or cannot come now."""
        for _ in range(2):  # a look that has begun before tells nothing of now
            looked = self._looked
            if not self._answered.happened:
                looked.wait(deadline)
        return looked.happened or self._answered.happened

    def close(self) -> None:
        """Stops what runs; what is held goes with its last holder. Idempotent."""
        super().close()
        self._stop_listening()
        self._answered.happen()
        self._looked.happen()

    def gone(self) -> bool:
        """Whether the other end of the connection is closed. Only while held."""
        return _libc.has_news(self._sock.fileno(), select.POLLRDHUP)  # POLLHUP and POLLERR are always told

    def lost(self) -> Fault:
        """What a read ends with then."""
        return Fault(FaultKind.PEER_LOST, "the process that shares its memory has ended, or has withdrawn it")

    def beyond(self, address: int) -> Fault:
        """What a read of ``address``, which is in no area, ends with."""
        if self.reason:
            return Fault(FaultKind.CHANNEL, self.reason, cause=self.cause)
        return Fault(FaultKind.SOURCE, f"address {address:#x} is not in memory that the peer shares")

    def close_after_fork(self) -> None:
        """In a forked child: closes the descriptor; the mappings are not there."""
        self._sock.close()

    def _free(self) -> None:
        end(self._sock)
        mapped, self._mapped = self._mapped, []
        self.words = None
        _unmap(mapped)

    def _stop_listening(self) -> None:
        """Takes the socket out of the control loop, which may run a last ``hear`` meanwhile. Not under the lock.

        By two threads at once: both steps are idempotent.
        """
        if not self._listening:
            return
        try:
            self._drop_reader(self._sock)
        finally:
            self._listening = False
            self.let_go(_LOOP)

    def _receive(self) -> bool:
        """Takes the answer if it has come; whether it has to stay where it is, for want of room for it here."""
        fds: list[int] = []
        what = "the connection to the peer's memory broke"
        try:
            message, fds, truncated = self._look()
            what = "the peer's memory cannot be mapped"
            reason = self._map(message, fds, truncated)
        except BlockingIOError:
            return False
        except (OSError, MemoryError) as exc:
            self.cause, reason = exc, f"{what}: {reason_of(exc)}"
            if is_shortage(exc):
                self.reason = reason
                looked, self._looked = self._looked, _Latch()
                looked.happen()
                return True
        else:
            self.cause = None
        finally:
            for fd in fds:
                os.close(fd)
        self._settle(reason)
        return False

    def _look(self) -> tuple[bytes, list[int], bool]:
        """See ``look``."""
        try:
            return look(self._sock)
        except ConnectionResetError:  # the other end closed without reading the proof; its answer comes next
            return look(self._sock)

    def _settle(self, reason: str) -> None:
        self.reason = reason
        with contextlib.suppress(OSError):
            self._sock.recv(1, socket.MSG_DONTWAIT)  # with what it holds
        self._answered.happen()
        self._looked.happen()

    def _map(self, message: bytes, fds: Sequence[int], truncated: bool) -> str:
        """Maps what came with the answer; returns why it cannot, or "".

        Raises:
            OSError: The system refuses; nothing is mapped.
        """
        if message != GRANTED:
            text = message[1:].decode(errors="replace")
            return f"the peer refused: {text}" if text else "the peer closed the connection without an answer"
        if truncated and len(fds) < len(self._announced):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        if len(fds) != len(self._announced):
            return f"the peer sent {len(fds)} areas of {len(self._announced)}; refused"
        for fd, (_, nbytes) in zip(fds, self._announced, strict=True):
            reason = _unsafe(fd, nbytes)
            if reason:
                return reason
        self._map_all(fds)
        return ""

    def _map_all(self, fds: Sequence[int]) -> None:
        mapped: list[tuple[int, int]] = []
        try:
            for fd, (_, nbytes) in zip(fds, self._announced, strict=True):
                here = map_memory(None, nbytes, mmap.PROT_READ, mmap.MAP_SHARED, fd)
                mapped.append((here, nbytes))
                with contextlib.suppress(OSError):  # a child would only keep it alive
                    advise(here, nbytes, mmap.MADV_DONTFORK)
        except BaseException:
            _unmap(mapped)
            raise
        self.areas = Areas(
            (address, nbytes, here - address)
            for (here, _), (address, nbytes) in zip(mapped, self._announced, strict=True)
        )
        self.words = _Words(self._announced[0][0], *mapped[0])  # the slab comes first
        self._mapped = mapped[1:]


def look(sock: socket.socket) -> tuple[bytes, list[int], bool]:
    """The next message, which stays in the queue; its descriptors; whether some found no room in this process.

    (``socket.recv_fds`` knows no flags, whatever it is given.)
    """
    fds = array("i")
    message, ancillary, flags, _ = sock.recvmsg(
        limits.ANSWER_TEXT_NBYTES, socket.CMSG_LEN(limits.AREAS * fds.itemsize), _LOOK
    )
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return message, fds.tolist(), bool(flags & _TRUNCATED)


def _unmap(mapped: Sequence[tuple[int, int]]) -> None:
    """Takes mappings away; large ones on a thread of its own.

    Who holds them last may be the control thread, or a caller who waits for an error, and the memory of an owner
    that has ended goes with them: a tenth of a second for each GiB.
    """

    def work() -> None:
        for address, nbytes in mapped:
            unmap(address, nbytes)

    if sum(nbytes for _, nbytes in mapped) <= _QUICK_NBYTES:
        work()
        return
    try:
        start_thread(work, "llm-datadist-unmap")
    except OutOfMemoryError:
        work()


def _unsafe(fd: int, nbytes: int) -> str:
    """Why a descriptor of the peer must not be mapped, or ""."""
    if not is_safe_to_map(fd):
        return "the peer sent memory that it could still shrink or write through another mapping; refused"
    size = os.fstat(fd).st_size
    if size < nbytes:
        return f"the peer sent {size} bytes of memory and announced {nbytes}; refused"
    return ""
