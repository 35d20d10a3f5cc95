"""``sendmsg`` and ``recvmsg`` on iovec arrays: bytes between sockets and raw addresses, no copy of ours.

Strategy: one reusable NumPy table of iovecs per connection, filled from ``Extents.take_pairs`` and passed by
pointer; a partial transfer is resumed by moving the table's head to the exact byte.
Invariants: the kernel checks every address (a bad one is EFAULT, never a signal); SIGPIPE is never raised.
Threads: a table belongs to one thread at a time. The calls named ``..._now`` never wait and keep the GIL: a
thread that gives it up waits up to 5 ms to have it back where another one runs Python in a loop. They are
for at most ``NOW_NBYTES``; all other calls run without the GIL.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
import sys

import numpy as np

from llm_datadist._core.segments import U64, Extents

NOW_NBYTES = 64 << 10  # some 10 microseconds of copying: as long as the GIL is kept, and no longer
IOV_MAX = 1024  # the kernel's limit of iovecs per call (UIO_MAXIOV)

# Plain ints: the enums of ``socket`` cost a microsecond per operator.
NO_WAIT = int(socket.MSG_DONTWAIT)
WAIT_ALL = int(socket.MSG_WAITALL)
MORE = int(socket.MSG_MORE)
_NO_SIGNAL = int(socket.MSG_NOSIGNAL)
SEND_NOW = NO_WAIT | _NO_SIGNAL  # for Python's own send
_SOL_SOCKET, _SO_RCVTIMEO = int(socket.SOL_SOCKET), int(socket.SO_RCVTIMEO)

_KEEPALIVE_S = 60  # below the idle limits of common firewalls (minutes)
_RTT_AT = 68  # tcpi_rtt in a tcp_info, microseconds
_TIMEVAL = struct.Struct("@ll")
_PAIR = struct.Struct("@QQ")  # an iovec
_IOV_AT = 16  # where the pointer and the count of iovecs are in a msghdr


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
_libc_now = ctypes.PyDLL(None, use_errno=True)  # keeps the GIL
_sendmsg, _sendmsg_now = _libc.sendmsg, _libc_now.sendmsg
_recvmsg, _recvmsg_now = _libc.recvmsg, _libc_now.recvmsg
_recv, _recv_now, _send_now = _libc.recv, _libc_now.recv, _libc_now.send
for _call in (_sendmsg, _recvmsg, _sendmsg_now, _recvmsg_now):
    _call.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
    _call.restype = ctypes.c_ssize_t
for _call in (_recv, _recv_now, _send_now):
    _call.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    _call.restype = ctypes.c_ssize_t


def send_now(fd: int, data: bytes) -> int:
    """Sends what the socket takes at once, and says how much that was. Keeps the GIL.

    Raises:
        OSError: As the system reports it; never BlockingIOError.
    """
    done: int = _send_now(fd, data, len(data), SEND_NOW)
    if done < 0:
        check_sent()
    return max(0, done)


SEND_NOW_CALL = _send_now
"""(fd, data, nbytes, ``SEND_NOW``) -> bytes sent; negative if none, see ``check_sent``. Keeps the GIL."""


def check_sent() -> None:
    """After a call that has sent nothing.

    Raises:
        OSError: As the system reports it; never BlockingIOError.
    """
    _nothing("send")


def receive_now(fd: int, buffer: Buffer) -> int:
    """Receives what is there, at most ``buffer``; 0 at the end of the stream, -1 if nothing is there yet.

    Keeps the GIL.

    Raises:
        OSError: As the system reports it; never BlockingIOError.
    """
    done: int = _recv_now(fd, buffer.address, buffer.nbytes, NO_WAIT)
    return done if done >= 0 else _nothing("recv")


def receive_if_there(fd: int, address: int, nbytes: int) -> int:
    """As :func:`receive_now`, with the GIL given up, so that others may run: to be called again and again."""
    done: int = _recv(fd, address, nbytes, NO_WAIT)
    return done if done >= 0 else _nothing("recv")


def receive_into(fd: int, address: int, nbytes: int) -> int:
    """Receives ``nbytes``, or less if the socket's time is over; 0 at the end of the stream.

    Raises:
        OSError: As the system reports it.
    """
    done: int = _recv(fd, address, nbytes, WAIT_ALL)
    if done < 0:
        raise _error("recv")
    return done


def _nothing(what: str) -> int:
    """-1 if the call that just failed would have had to wait. Raises OSError for anything else."""
    if ctypes.get_errno() == errno.EAGAIN:
        return -1
    raise _error(what)


def _error(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")


class Iovecs:
    """A table of at most ``IOV_MAX`` (address, nbytes) pairs, consumed from its head."""

    __slots__ = ("_bytes", "_head", "_message", "_message_at", "_table", "_table_at", "_tail", "nbytes")

    def __init__(self) -> None:
        self._table = np.zeros((IOV_MAX, 2), dtype=np.uint64)
        self._bytes = self._table.data.cast("B")
        self._table_at: int = self._table.ctypes.data
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
        _PAIR.pack_into(self._bytes, _PAIR.size * self._tail, address, nbytes)
        self._tail += 1
        self.nbytes += nbytes

    def extend(self, pairs: U64, nbytes: int) -> None:
        """Adds what ``Extents.take_pairs`` returned."""
        stop = self._tail + len(pairs)
        self._table[self._tail : stop] = pairs
        self._tail = stop
        self.nbytes += nbytes

    def load(self, extents: Extents, at: int, nbytes: int, spare: int = 0) -> int:
        """Adds the runs of stream bytes from ``at``, as many as fit; returns the bytes that they cover.

        Args:
            extents: Whose stream.
            at: Its first byte to add.
            nbytes: Bytes to add, which must be there.
            spare: Pairs that must still fit afterwards.
        """
        if len(extents.offsets) == 1 == len(extents.bases):  # one block: its latency counts
            self.append(extents.bases.item() + extents.offsets.item() + at, nbytes)
            return nbytes
        pairs, loaded = extents.take_pairs(at, nbytes, self.room - spare)
        self.extend(pairs, loaded)
        return loaded

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
        done = self._transfer(_sendmsg, fd, flags | _NO_SIGNAL)
        if done < 0:
            raise _error("sendmsg")
        return done

    def send_now(self, fd: int) -> int:
        """As :meth:`send`, without waiting and with the GIL kept; 0 if the socket takes nothing for now."""
        done = self._transfer(_sendmsg_now, fd, SEND_NOW)
        return done if done >= 0 else max(0, _nothing("sendmsg"))

    def receive(self, fd: int, flags: int) -> int:
        """``recvmsg`` into what the table holds; 0 at the end of the stream. Raises as :meth:`send`."""
        done = self._transfer(_recvmsg, fd, flags)
        if done < 0:
            raise _error("recvmsg")
        return done

    def receive_now(self, fd: int) -> int:
        """As :meth:`receive`, without waiting and with the GIL kept; -1 if nothing is there yet."""
        done = self._transfer(_recvmsg_now, fd, NO_WAIT)
        return done if done >= 0 else _nothing("recvmsg")

    def _transfer(self, call: ctypes._NamedFuncPointer, fd: int, flags: int) -> int:
        head = self._head
        _PAIR.pack_into(self._message, _IOV_AT, self._table_at + _PAIR.size * head, self._tail - head)
        done: int = call(fd, self._message_at, flags)
        if done == self.nbytes:
            self._head = self._tail = self.nbytes = 0
        elif done > 0:
            self.advance(done)
        return done


class Buffer:
    """A few bytes of our own at a fixed address, to mix with the caller's memory in one table."""

    __slots__ = ("address", "nbytes", "view")

    def __init__(self, nbytes: int) -> None:
        array = np.zeros(nbytes, dtype=np.uint8)
        self.nbytes = nbytes
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


def round_trip_s(sock: socket.socket) -> float:
    """The kernel's estimate for a connection, of its handshake at first; 0.0 if it has none."""
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RTT_AT + 4)
    except OSError:
        return 0.0
    return int.from_bytes(info[_RTT_AT:], sys.byteorder) / 1e6 if len(info) == _RTT_AT + 4 else 0.0


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
