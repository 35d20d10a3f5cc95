"""JSON objects, one a line, over a plain socket between two processes of the demo."""

from __future__ import annotations

import json
import socket
from threading import Lock
from typing import Any

Message = dict[str, Any]


class PeerGoneError(Exception):
    """The process at the other end has ended."""


class Lines:
    """One end. Any thread may send; one receives."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._reader = end.makefile("r", encoding="utf-8", newline="\n")
        self._sending = Lock()

    def send(self, message: Message) -> None:
        """Sends one object."""
        try:
            with self._sending:
                self._end.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise PeerGoneError from error

    def receive(self) -> Message:
        """Waits for one object."""
        try:
            line = self._reader.readline()
        except OSError as error:
            raise PeerGoneError from error
        if not line.endswith("\n"):
            raise PeerGoneError
        message: Message = json.loads(line)
        return message

    def close(self) -> None:
        """Closes this end; a thread that receives here must have ended."""
        self._reader.close()
        self._end.close()
