"""Transport ``shm``, the owner's side: gives the descriptors of its areas to readers that may have them.

Strategy: a reader shows the proof of a handshake, and the kernel says whose process it is; the answer is
one message, with the descriptors or with the reason why not. Each proof is good for one reader. The
connection then stays open, silent: its end tells either side that the other has gone.
Threads: ``welcome`` and the callbacks run on the control thread; ``close`` on any.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Sequence

from llm_datadist._core import limits
from llm_datadist._shortages import reason_of
from llm_datadist._wire.proofs import PROOF_NBYTES
from llm_datadist.devices.shared_memory import SharedArea
from llm_datadist.transports._meeting import AdoptReader, DropReader, credentials, end, stands_for_many

GRANTED = b"\0"
REFUSED = b"\1"  # the reason follows


class Giver:
    """Connections of readers.

    Args:
        areas: What they are given; open until ``close``.
        adopt_reader: Registers a socket and a callback for "readable" with the control loop.
        drop_reader: Takes the socket out again.
    """

    def __init__(
        self, areas: Sequence[SharedArea], adopt_reader: AdoptReader, drop_reader: DropReader
    ) -> None:
        self._descriptors = [area.fd for area in areas]
        self._proofs: set[bytes] = set()
        self._adopt_reader = adopt_reader
        self._drop_reader = drop_reader
        self._lock = threading.Lock()
        self._readers: dict[socket.socket, bool] = {}  # whether it has been given the areas
        self._closed = False

    def expect(self, proof: bytes) -> None:
        """A handshake is under way whose peer may show that."""
        self._proofs.add(proof)

    def expects(self, proof: bytes) -> bool:
        """Whether it has not been shown yet."""
        return proof in self._proofs

    def forget(self, proof: bytes) -> None:
        """The handshake is over."""
        self._proofs.discard(proof)

    def welcome(self, sock: socket.socket) -> None:
        """Takes over an accepted connection."""
        sock.setblocking(False)
        refusal = whose_refusal(os.geteuid(), credentials(sock)[1])
        with self._lock:
            if len(self._readers) >= limits.READERS:
                refusal = f"the owner of the memory has {limits.READERS} readers, which is the most"
            if not self._closed and not refusal:
                self._readers[sock] = False
            silent = [reader for reader, given in self._readers.items() if not given]
        if sock not in self._readers:
            _refuse(sock, refusal)
            return
        for reader in silent[: -limits.SILENT_READERS]:
            self._hear(reader)
            if self._readers.get(reader) is False:
                self._let_go(reader)
        try:
            self._adopt_reader(sock, lambda: self._hear(sock))
        except OSError as exc:
            with self._lock:
                self._readers.pop(sock, None)
            _refuse(sock, f"the owner of the memory cannot watch another connection: {reason_of(exc)}")
            return
        self._hear(sock)

    def hear_all(self) -> None:
        """Answers those that have shown something by now."""
        for sock in [sock for sock, given in self._readers.items() if not given]:
            self._hear(sock)

    def close(self) -> None:
        """Ends all connections."""
        with self._lock:
            self._closed = True
            readers, self._readers = list(self._readers), {}
        for sock in readers:
            self._drop_reader(sock)
            end(sock)

    def close_after_fork(self) -> None:
        """In a forked child: closes its copies of the descriptors and touches nothing else."""
        for sock in self._readers:
            sock.close()

    def _hear(self, sock: socket.socket) -> None:
        """Reads what has come: the proof, once; anything after it is the end."""
        try:
            message = sock.recv(PROOF_NBYTES + 1)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        if message and self._readers.get(sock) is False and self._answer(sock, message):
            with self._lock:
                if not self._closed:
                    self._readers[sock] = True
            return
        self._let_go(sock)

    def _let_go(self, sock: socket.socket) -> None:
        with self._lock:
            known = self._readers.pop(sock, None) is not None
        if known:
            self._drop_reader(sock)
            end(sock)

    def _answer(self, sock: socket.socket, proof: bytes) -> bool:
        if proof not in self._proofs:
            say_refusal(
                sock,
                "what this process shows is not the proof of a handshake that is under way here: the link is another "
                "process's, or it was shown before",
            )
            return False
        self._proofs.discard(proof)
        try:
            socket.send_fds(sock, [GRANTED], self._descriptors)
        except OSError as exc:
            say_refusal(sock, f"the owner of the memory cannot pass it on: {exc}")
            return False
        return True


def whose_refusal(owner_uid: int, reader_uid: int) -> str:
    """Why a process of one user may not read what another's shares, or "". Root may read everything anyhow."""
    if reader_uid == 0 or (reader_uid == owner_uid and not stands_for_many(owner_uid)):
        return ""
    if reader_uid == owner_uid:
        return (
            f"user id {owner_uid} stands for every user that this user namespace does not know, so nobody is sure to "
            "be the same one; run the engine as a user id of its own"
        )
    return (
        f"its memory belongs to user id {owner_uid}, the reader runs as {reader_uid}; pools are shared within one "
        "user, and with root"
    )


def _refuse(sock: socket.socket, reason: str) -> None:
    say_refusal(sock, reason)
    end(sock)


def say_refusal(sock: socket.socket, reason: str) -> None:
    """Answers a reader who is not given the areas."""
    with contextlib.suppress(OSError):
        sock.send(REFUSED + reason.encode())
