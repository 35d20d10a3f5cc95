"""``sendmsg`` and ``recvmsg`` on iovec arrays: bytes between sockets and raw addresses, no copy of ours.

Strategy: one reusable NumPy table of iovecs per connection, filled from ``Extents.take_pairs`` and passed by
pointer; a partial transfer is resumed by moving the table's head to the exact byte.
Invariants: the kernel checks every address (a bad one is EFAULT, never a signal); SIGPIPE is never raised.
Threads: the calls run without the GIL; a table belongs to one thread at a time.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct

import numpy as np

from llm_datadist._core.segments import U64

IOV_MAX = 1024  # the kernel's limit of iovecs per call (UIO_MAXIOV)

# Plain ints: the enums of ``socket`` cost a microsecond per operator.
NO_WAIT = int(socket.MSG_DONTWAIT)
WAIT_ALL = int(socket.MSG_WAITALL)
MORE = int(socket.MSG_MORE)
_NO_SIGNAL = int(socket.MSG_NOSIGNAL)
_SOL_SOCKET, _SO_RCVTIMEO = int(socket.SOL_SOCKET), int(socket.SO_RCVTIMEO)
SEND_NOW = NO_WAIT | _NO_SIGNAL  # for Python's own send

_KEEPALIVE_S = 60  # below the idle limits of common firewalls (minutes)
_TIMEVAL = struct.Struct("@ll")


class _MsgHdr(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_void_p),
        ("namelen", ctypes.c_uint32),
        ("iov", ctypes.c_void_p),
        ("iovlen", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("controllen", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


_libc = ctypes.CDLL(None, use_errno=True)
_sendmsg = _libc.sendmsg
_recvmsg = _libc.recvmsg
for _call in (_sendmsg, _recvmsg):
    _call.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
    _call.restype = ctypes.c_ssize_t


class Iovecs:
    """A table of at most ``IOV_MAX`` (address, nbytes) pairs, consumed from its head."""

    __slots__ = ("_head", "_message", "_message_at", "_table", "_table_at", "_tail", "nbytes")

    def __init__(self) -> None:
        self._table = np.zeros((IOV_MAX, 2), dtype=np.uint64)
        self._table_at = self._table.ctypes.data
        self._message = _MsgHdr()
        self._message_at = ctypes.addressof(self._message)
        self._head = self._tail = 0
        self.nbytes = 0  # bytes in the table, not yet transferred

    @property
    def room(self) -> int:
        """Pairs that still fit."""
        return IOV_MAX - self._tail

    def clear(self) -> None:
        """Forgets all pairs."""
        self._head = self._tail = self.nbytes = 0

    def append(self, address: int, nbytes: int) -> None:
        """Adds one pair."""
        row = self._tail
        self._table[row, 0] = address
        self._table[row, 1] = nbytes
        self._tail = row + 1
        self.nbytes += nbytes

    def extend(self, pairs: U64, nbytes: int) -> None:
        """Adds what ``Extents.take_pairs`` returned."""
        stop = self._tail + len(pairs)
        self._table[self._tail : stop] = pairs
        self._tail = stop
        self.nbytes += nbytes

    def advance(self, nbytes: int) -> None:
        """Drops the first ``nbytes`` bytes, which were transferred."""
        if nbytes >= self.nbytes:
            self.clear()
            return
        ends = np.cumsum(self._table[self._head : self._tail, 1])
        skipped = int(np.searchsorted(ends, nbytes, side="right"))
        within = nbytes - (int(ends[skipped - 1]) if skipped else 0)
        self._head += skipped
        self._table[self._head, 0] += np.uint64(within)
        self._table[self._head, 1] -= np.uint64(within)
        self.nbytes -= nbytes

    def send(self, fd: int, flags: int) -> int:
        """``sendmsg`` of what the table holds; the bytes sent are dropped from it.

        Raises:
            OSError: As the system reports it (BlockingIOError, EFAULT, ...); the table is unchanged.
        """
        return self._transfer(_sendmsg, "sendmsg", fd, flags | _NO_SIGNAL)

    def receive(self, fd: int, flags: int) -> int:
        """``recvmsg`` into what the table holds; 0 at the end of the stream. Raises as :meth:`send`."""
        return self._transfer(_recvmsg, "recvmsg", fd, flags)

    def _transfer(self, call: ctypes._NamedFuncPointer, name: str, fd: int, flags: int) -> int:
        message = self._message
        message.iov = self._table_at + 16 * self._head
        message.iovlen = self._tail - self._head
        done = int(call(fd, self._message_at, flags))
        if done < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"{name}: {os.strerror(number)}")
        self.advance(done)
        return done


class Buffer:
    """A few bytes of our own at a fixed address, to mix with the caller's memory in one table."""

    __slots__ = ("address", "view")

    def __init__(self, nbytes: int) -> None:
        array = np.zeros(nbytes, dtype=np.uint8)
        self.address: int = array.ctypes.data
        self.view = array.data  # keeps the array alive


def tune(sock: socket.socket) -> None:
    """Options of every data connection.

    Raises:
        OSError: It is broken already.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # An idle connection that a firewall has forgotten is found dead before a read needs it.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_S)


def set_receive_timeout(sock: socket.socket, seconds: float) -> None:
    """Bounds each blocking receive of ``sock``; the kernel takes 0 for "for ever", so 1 ms is the least."""
    micros = max(1000, int(seconds * 1e6))
    sock.setsockopt(_SOL_SOCKET, _SO_RCVTIMEO, _TIMEVAL.pack(*divmod(micros, 1_000_000)))


def is_gone(error: OSError) -> bool:
    """Whether a system error means that the other end is not there (any more)."""
    return error.errno in _GONE


_GONE = frozenset(
    {
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.ECONNABORTED,
        errno.EPIPE,
        errno.EHOSTUNREACH,
        errno.ENETUNREACH,
        errno.EHOSTDOWN,
        errno.ENETDOWN,
        errno.ETIMEDOUT,
        errno.ENOTCONN,
    }
)
