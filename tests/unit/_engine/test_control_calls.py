"""How control connections send and receive."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from llm_datadist._engine.control_calls import ControlCalls
from llm_datadist._link.outbox import Outbox
from llm_datadist.transports import _sockets
from tests.support.world import wait_until

Ends = tuple[socket.socket, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        a = socket.create_connection(listener.getsockname())
        b, _ = listener.accept()
    a.setblocking(False)
    b.setblocking(False)
    with a, b:
        yield a, b


def test_what_is_sent_is_received(ends: Ends) -> None:
    a, b = ends
    calls = ControlCalls()
    assert calls.receive(b.fileno()) is None, "nothing is there yet, and nobody waits for it"
    assert sent(calls, a, b"first") == 5
    first = received(calls, b)
    assert sent(calls, a, b"second!") == 7
    assert (first, received(calls, b)) == (b"first", b"second!"), "the one is not the buffer of the other"
    a.close()
    assert received(calls, b) == b""


def sent(calls: ControlCalls, sock: socket.socket, data: bytes) -> int:
    outbox = Outbox()
    outbox.put([data])
    calls.send(sock.fileno(), outbox)
    return outbox.forget_sent()


def received(calls: ControlCalls, sock: socket.socket) -> bytes | None:
    got: list[bytes | None] = []

    def look() -> bool:
        got.append(calls.receive(sock.fileno()))
        return got[-1] is not None

    assert wait_until(look)
    return got[-1]


def test_no_more_than_it_says_at_once(ends: Ends) -> None:
    a, b = ends
    calls = ControlCalls()
    data = bytes(range(256)) * (calls.nbytes // 256) + b"rest"
    a.setblocking(True)
    a.sendall(data)
    assert wait_until(lambda: len(b.recv(1 << 20, socket.MSG_PEEK)) == len(data))
    assert calls.receive(b.fileno()) == data[: calls.nbytes]
    assert calls.receive(b.fileno()) == b"rest"


def test_a_socket_that_is_full_takes_nothing(ends: Ends) -> None:
    a, _ = ends
    calls, data = ControlCalls(), bytes(64 << 10)

    def full() -> bool:
        return sent(calls, a, data) == 0

    assert wait_until(full)


def test_errors_are_the_system_s(ends: Ends) -> None:
    a, b = ends
    calls = ControlCalls()
    b.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    b.close()
    with pytest.raises(OSError) as failed:
        received(calls, a)
    assert failed.value.errno == errno.ECONNRESET
    with pytest.raises(BrokenPipeError):
        sent(calls, a, b"x")


def test_the_gil_is_kept(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a thread that runs Python without a pause, giving it up costs 5 ms."""

    def refuse(*_: Any) -> int:
        raise AssertionError("a call that gives the GIL up")

    for name in ("_sendmsg", "_recvmsg", "_recv"):
        monkeypatch.setattr(_sockets, name, refuse)
    a, b = ends
    calls = ControlCalls()
    sent(calls, a, b"word")
    assert received(calls, b) == b"word"
