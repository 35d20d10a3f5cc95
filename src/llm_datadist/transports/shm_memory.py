"""Transport ``shm``, the reader's side: the peer's areas as they are mapped here, and whether it still lives.

Strategy: the owner answers from its control thread, for which ours must not wait (both may be opening at
once). Ours takes the answer in whenever it comes: no interrupt of a caller can lose it half-way. Callers
wait for it, only shortly.
Invariants: what is mapped is read-only and sealed, so the peer can neither take it away under a copy
(SIGBUS) nor be harmed by us; it stays mapped while a read holds it. A forked child has none of it.
Threads: every method may be called from any thread, but ``hear`` from one at a time.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import select
import socket
import threading
import time
from collections.abc import Sequence

from llm_datadist._core import limits
from llm_datadist._shortages import reason_of, start_thread
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
_QUICK_NBYTES = 64 << 20  # unmapped in a few milliseconds
_RECEIVE = int(socket.MSG_CMSG_CLOEXEC) | int(socket.MSG_DONTWAIT)
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
        "_announced", "_answer_by", "_answered", "_drop_reader", "_listening", "_mapped", "_sock", "areas",
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

    def hear(self) -> None:
        """Takes the answer if it has come; once is enough."""
        with self.hold() as held:
            if held and not self._answered.happened:
                self._receive()
        if not held or self._answered.happened:
            self._stop_listening()

    def settle(self) -> Areas:
        """The areas; none of them as long as the peer has not sent them, or when it does not. Only while held."""
        if not self._answered.happened:
            self._answered.wait(self._answer_by)
        return self.areas

    def settle_by(self, deadline: float) -> bool:
        """Waits for the answer; whether it has come, or cannot come any more."""
        self._answered.wait(deadline)
        return self._answered.happened

    def close(self) -> None:
        """Stops what runs; what is held goes with its last holder. Idempotent."""
        super().close()
        self._stop_listening()
        self._answered.happen()

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

    def _receive(self) -> None:
        """Takes the answer if it has come."""
        try:
            message, fds = self._take_message()
        except BlockingIOError:
            return
        except (OSError, MemoryError) as exc:
            self.cause = exc
            self._settle(f"the connection to the peer's memory broke: {reason_of(exc)}")
            return
        try:
            self._settle(self._map(message, fds))
        except (OSError, MemoryError) as exc:
            self.cause = exc
            self._settle(f"the peer's memory cannot be mapped: {reason_of(exc)}")
        finally:
            for fd in fds:
                os.close(fd)

    def _take_message(self) -> tuple[bytes, list[int]]:
        try:
            message, fds, _, _ = socket.recv_fds(
                self._sock, limits.ANSWER_TEXT_NBYTES, limits.AREAS, _RECEIVE
            )
        except ConnectionResetError:  # the other end closed without reading the proof; its answer comes next
            message, fds, _, _ = socket.recv_fds(
                self._sock, limits.ANSWER_TEXT_NBYTES, limits.AREAS, _RECEIVE
            )
        return message, fds  # those that find no room here are missing

    def _settle(self, reason: str) -> None:
        self.reason = reason
        self._answered.happen()

    def _map(self, message: bytes, fds: Sequence[int]) -> str:
        """Maps what came with the answer; returns why it cannot, or ""."""
        if message != GRANTED:
            text = message[1:].decode(errors="replace")
            return f"the peer refused: {text}" if text else "the peer closed the connection without an answer"
        if len(fds) != len(self._announced):
            return (
                f"the peer sent {len(fds)} areas of {len(self._announced)}; is this process out of descriptors? Raise "
                "the limit (RLIMIT_NOFILE, ulimit -n), then link again"
            )
        shifts = []
        for fd, (address, nbytes) in zip(fds, self._announced, strict=True):
            reason = _unsafe(fd, nbytes)
            if reason:
                return reason
            here = map_memory(None, nbytes, mmap.PROT_READ, mmap.MAP_SHARED, fd)
            if self.words is None:  # the slab comes first
                self.words = _Words(address, here, nbytes)
            else:
                self._mapped.append((here, nbytes))
            with contextlib.suppress(OSError):  # a child would only keep it alive
                advise(here, nbytes, mmap.MADV_DONTFORK)
            shifts.append((address, nbytes, here - address))
        self.areas = Areas(shifts)
        return ""


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
