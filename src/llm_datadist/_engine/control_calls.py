"""How control connections send and receive: without giving up the GIL.

Strategy: the calls of ``transports._sockets`` that keep it; messages are short, and a worker that answers a peer,
or the control thread that reads its question, would else wait for the GIL once more. Threads: ``send`` in any.
"""

from __future__ import annotations

import threading

from llm_datadist._link.outbox import Outbox
from llm_datadist.transports._sockets import (
    NOW_NBYTES,
    SEND_NOW,
    SEND_NOW_CALL,
    Buffer,
    check_sent,
    receive_now,
)


class ControlCalls:
    """Implements ``_link.seam.SocketCalls`` for one control thread."""

    nbytes = NOW_NBYTES

    def __init__(self) -> None:
        self._own = threading.local()  # goes with the thread: a finalized engine is garbage for a while

    def send(self, fd: int, outbox: Outbox) -> None:
        """See ``SocketCalls``."""
        data = outbox.joined()
        outbox.send(SEND_NOW_CALL, fd, data, len(data), SEND_NOW)
        if outbox.result < 0:
            check_sent()

    def receive(self, fd: int) -> bytes | None:
        """See ``SocketCalls``."""
        try:
            buffer: Buffer = self._own.buffer
        except AttributeError:
            buffer = self._own.buffer = Buffer(NOW_NBYTES)
        nbytes = receive_now(fd, buffer)
        return None if nbytes < 0 else bytes(buffer.view[:nbytes])
