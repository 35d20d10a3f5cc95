"""How control connections send and receive: without giving up the GIL.

Strategy: the calls of ``transports._sockets`` that keep it; messages are short, and a worker that answers a peer,
or the control thread that reads its question, would else wait for the GIL once more. Threads: ``send`` in any.
"""

from __future__ import annotations

from llm_datadist.transports._sockets import NOW_NBYTES, Buffer, receive_now, send_now


class ControlCalls:
    """Implements ``_link.seam.SocketCalls`` for one control thread."""

    nbytes = NOW_NBYTES

    def __init__(self) -> None:
        self._buffer = Buffer(NOW_NBYTES)

    def send(self, fd: int, data: bytes) -> int:
        """See ``SocketCalls``."""
        return send_now(fd, data)

    def receive(self, fd: int) -> bytes | None:
        """See ``SocketCalls``."""
        nbytes = receive_now(fd, self._buffer)
        return None if nbytes < 0 else bytes(self._buffer.view[:nbytes])
