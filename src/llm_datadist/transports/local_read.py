"""Transport ``local``: reads by calls of the kernel.

How a plan is shared and ended, ``_one_sided`` says. For a process that has ended the kernel answers ESRCH,
or EFAULT while it is being taken down; the pidfd tells the two apart from a bad address.
"""

from __future__ import annotations

import errno
import os
import select
import time

from llm_datadist._core.segments import U64, Segments
from llm_datadist.transports import _libc
from llm_datadist.transports._one_sided import OneSidedRead, Owner
from llm_datadist.transports._rows import KernelRows
from llm_datadist.transports.movers import Movers
from llm_datadist.transports.seam import Fault, FaultKind, OnCut


class Peer(Owner):
    """The other process: its pid, and the descriptor that tells when it has gone."""

    __slots__ = ("_fd", "_news", "pid")

    def __init__(self, pid: int, pidfd: int) -> None:
        super().__init__()
        self.pid = pid
        self._fd = pidfd
        self._news = _libc.repeated_news(pidfd, select.POLLIN)

    def gone(self) -> bool:
        """Whether the process has ended. If not held, look at ``closed`` afterwards."""
        return self._fd < 0 or self._news() > 0

    def lost(self) -> Fault:
        """What a read ends with then."""
        return Fault(FaultKind.PEER_LOST, f"process {self.pid} has ended")

    def close_after_fork(self) -> None:
        """In a forked child: closes the descriptor, without the lock, which another thread may have held."""
        self._free()

    def _free(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class OwnProcess(Peer):
    """This process as the peer, for copies within it: it cannot be gone, and needs no descriptor."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(os.getpid(), -1)

    def gone(self) -> bool:
        """Never."""
        return False


def read_word(peer: Peer, address: int) -> int | Fault:
    """A word of the peer, or why it cannot be read."""
    word = _libc.read_u64(peer.pid, address)
    gone = peer.gone()
    if (
        peer.closed
    ):  # looked at last, since nothing is held: of another process than the peer nothing is believed
        return Fault(FaultKind.CANCELLED, "the channel is closed")
    if gone or word == -errno.ESRCH:
        return peer.lost()
    if word >= 0:
        return word
    reason = f"the word at {address:#x} of process {peer.pid} cannot be read: {os.strerror(-word)}"
    kind = FaultKind.SOURCE if word == -errno.EFAULT else FaultKind.CHANNEL
    return Fault(kind, reason, cause=OSError(-word, os.strerror(-word)))


class LocalRows:
    """Reads of one unit of each tensor, as the seam's ``Rows``.

    Nothing is held: that the channel is still open is looked at after all that may have used a descriptor.
    """

    __slots__ = ("_peer", "_rows")

    def __init__(self, peer: Peer, source: U64, destination: U64, nbytes: int) -> None:
        self._peer = peer
        self._rows = KernelRows(peer.pid, source, destination, nbytes)

    def read(self, there: int, here: int, *, deadline: float, on_cut: OnCut) -> bool:
        """One call of the kernel, between two looks at the channel."""
        peer = self._peer
        if peer.closed or time.monotonic() >= deadline:
            return False
        return self._rows.move(there, here) and not peer.gone() and not peer.closed


class LocalRead(OneSidedRead):
    """A read under way."""

    __slots__ = ("_peer",)

    def __init__(self, peer: Peer, movers: Movers, plan: Segments) -> None:
        super().__init__(peer, movers, plan)
        self._peer = peer

    def _begin(self, nbytes: int) -> int:
        run = self._one_run()
        if run is None or self._must_stop():
            return 0
        there, here = run
        return max(0, _libc.read_one(self._peer.pid, here, there, nbytes))

    def _move(self, at: int, stop: int) -> int:
        return self._move_by_kernel(self._peer.pid, at, stop)
