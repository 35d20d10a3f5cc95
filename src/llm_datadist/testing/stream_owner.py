"""The owner's side of a stream transport without an engine: a listening port, and reads by address.

Strategy: a selector spells out the ranges themselves, so that a test or a benchmark can read any memory of
the owner. For owners that a test has started: a real ``ReadSource`` never takes addresses from a peer.
Run as a module it is an owner process (see ``testing.owner``) with the extra commands ``listen``, ``refuse``
and ``counts``.
Threads: one daemon thread per ``Port``.
"""

from __future__ import annotations

import functools
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from llm_datadist._core.segments import Extents
from llm_datadist.status import LLMStatusCode
from llm_datadist.testing.owner import Handler, serve
from llm_datadist.transports.seam import Fault, FaultKind, PeerEndpoint, Serving, StreamTransport
from llm_datadist.transports.tcp import TcpTransport

TOKEN_NBYTES = 16
_HELLO_S = 5.0


def first_frame(link_token: bytes, dialler_reads: bool) -> bytes:
    """A stand-in for the engine's ``DataHello``."""
    return bytes([dialler_reads]) + link_token


def encode_extents(extents: Extents) -> bytes:
    """A selector that names these ranges."""
    counts = np.array([len(extents.bases), len(extents.offsets)], dtype="<u8")
    return b"".join(a.tobytes() for a in (counts, extents.bases, extents.offsets, extents.lengths))


@functools.lru_cache(maxsize=16)
def decode_extents(selector: bytes) -> Extents:
    """The inverse of :func:`encode_extents`.

    Raises:
        ValueError: It is not such a selector.
    """
    words = np.frombuffer(selector, dtype="<u8")
    if len(words) < 2 or 2 + int(words[0]) + 2 * int(words[1]) != len(words):
        raise ValueError(f"{len(selector)} bytes that are no selector of this source")
    tensors, runs = int(words[0]), int(words[1])
    bases, offsets, lengths = np.split(words[2:], [tensors, tensors + runs])
    return Extents.of(bases, offsets, lengths)


class ExtentsServing:
    """A read that is allowed as long as its source does not refuse."""

    def __init__(self, source: ExtentsSource, extents: Extents) -> None:
        self.extents = extents
        self._source = source
        self._open = True

    def check(self) -> Fault | None:
        """The refusal in force, if there is one."""
        self._source.checks += 1
        return self._source.refusal_after_opening

    def place_of(self, at: int) -> str:
        """Its position."""
        return f"byte {at} of the stream"

    def close(self) -> None:
        """Counts the read as over, once."""
        self._source.open_count -= self._open
        self._open = False


class ExtentsSource:
    """A ``ReadSource`` for selectors of :func:`encode_extents`.

    Attributes:
        refusal: What ``open`` answers, if set.
        refusal_after_opening: What ``check`` answers, if set.
        open_count: Reads opened and not closed.
        checks: Calls of ``check``.
    """

    def __init__(self) -> None:
        self.refusal: Fault | None = None
        self.refusal_after_opening: Fault | None = None
        self.open_count = 0
        self.checks = 0

    def open(self, link_token: bytes, selector: bytes) -> Serving | Fault:
        """See ``seam.ReadSource``."""
        if self.refusal is not None:
            return self.refusal
        try:
            serving = ExtentsServing(self, decode_extents(selector))
        except ValueError as exc:
            return Fault(FaultKind.REFUSED, str(exc), LLMStatusCode.LLM_PARAM_INVALID)
        self.open_count += 1
        return serving

    def send_now(self, link_token: bytes, selector: bytes, send: Callable[[Extents], None]) -> Fault | None:
        """See ``seam.ReadSource``."""
        serving = self.open(link_token, selector)
        if isinstance(serving, Fault):
            return serving
        try:
            refusal = serving.check()
            if refusal is None:
                send(serving.extents)
            return refusal
        finally:
            serving.close()

    def units(self, link_token: bytes, selector: bytes) -> None:
        """See ``seam.ReadSource``: selectors of addresses have no units."""


class Port:
    """A listening port whose connections are handed to a transport, as an engine does it."""

    def __init__(self, transport: StreamTransport, host: str = "127.0.0.1") -> None:
        self._transport = transport
        self._listener = socket.create_server((host, 0))
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._thread = threading.Thread(target=self._accept, name="port", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops listening."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            sock.settimeout(_HELLO_S)
            frame = sock.recv(1 + TOKEN_NBYTES, socket.MSG_WAITALL)
            if len(frame) < 1 + TOKEN_NBYTES:
                sock.close()
                continue
            sock.setblocking(False)
            self._transport.adopt(sock, frame[1:], bool(frame[0]), b"")


def main(handlers: Mapping[str, Handler] | None = None) -> None:
    """An owner process over TCP, with further commands."""
    source = ExtentsSource()
    transport = TcpTransport(source, first_frame)

    def listen(token: str, host: str = "127.0.0.1") -> list[Any]:
        peer = PeerEndpoint(2, b"", bytes.fromhex(token), None, lambda count: None)
        transport.open(peer, deadline=time.monotonic() + 1)
        return list(Port(transport, host).address)

    def refuse(code: int, text: str, after_opening: bool = False) -> None:
        refusal = Fault(FaultKind.REFUSED, text, code) if code else None
        if after_opening:
            source.refusal_after_opening = refusal
        else:
            source.refusal = refusal

    def counts() -> dict[str, int]:
        return {"open": source.open_count, "checks": source.checks}

    serve({"listen": listen, "refuse": refuse, "counts": counts, **(handlers or {})})


if __name__ == "__main__":
    main()
