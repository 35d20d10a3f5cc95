"""Making connections: names off the control thread, one address after the other, nothing left behind."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import pytest

from llm_datadist._link import dialer
from llm_datadist._link.dialer import Connector, numeric
from llm_datadist._link.loop import ControlLoop
from llm_datadist._link.seam import Address
from tests.support.shortage import Shortage


@pytest.fixture
def loop() -> Iterator[ControlLoop]:
    made = ControlLoop("test-loop")
    made.open()
    made.start()
    yield made
    made.stop(2)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        yield sock


class Result:
    """What a Connector reported."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.sock: socket.socket | None = None
        self.reason = ""
        self.count = 0

    def __call__(self, sock: socket.socket | None, reason: str) -> None:
        self.sock, self.reason = sock, reason
        self.count += 1
        self.ended.set()


def connect(loop: ControlLoop, address: Address) -> tuple[Connector, Result]:
    result = Result()
    connector = Connector(loop, address, result)
    loop.call_soon(connector.start)
    return connector, result


def test_a_connection_is_non_blocking_and_without_delay(loop: ControlLoop, listener: socket.socket) -> None:
    _, result = connect(loop, Address("127.0.0.1", listener.getsockname()[1]))
    assert result.ended.wait(5) and result.sock is not None
    with result.sock as sock:
        assert not sock.getblocking() and not sock.get_inheritable()
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_refusal_names_the_address(loop: ControlLoop) -> None:
    _, result = connect(loop, Address("127.0.0.1", 1))
    assert result.ended.wait(5) and result.sock is None
    assert result.reason.startswith("127.0.0.1:1: Connection refused; ")
    assert "start the peer" in result.reason


def test_the_next_address_is_tried(
    loop: ControlLoop, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = (socket.AF_INET, listener.getsockname())
    bad = (socket.AF_INET, ("127.0.0.1", 1))
    monkeypatch.setattr(dialer, "resolve", lambda address, **options: [bad, bad, good])
    _, result = connect(loop, Address("somewhere", 5))
    assert result.ended.wait(5) and result.sock is not None
    result.sock.close()


def test_an_address_that_swallows_does_not_hide_the_next(
    loop: ControlLoop, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        fillers = [socket.socket() for _ in range(3)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        candidates = [(socket.AF_INET, full.getsockname()), (socket.AF_INET, listener.getsockname())]
        monkeypatch.setattr(dialer, "resolve", lambda address, **options: list(candidates))
        monkeypatch.setattr(dialer, "NEXT_ADDRESS_S", 0.05)
        _, result = connect(loop, Address("somewhere", 5))
        assert result.ended.wait(5) and result.sock is not None
        assert result.sock.getpeername() == listener.getsockname()
        for sock in (*fillers, result.sock):
            sock.close()


def test_a_slow_name_service_holds_up_nobody(loop: ControlLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = threading.Event()

    def slow(address: Address, *, literal: bool = False, **options: object) -> list[dialer.Candidate]:
        if literal:
            raise OSError("not a literal")
        answer.wait(10)
        raise OSError(2, "no such host")

    monkeypatch.setattr(dialer, "resolve", slow)
    connector, result = connect(loop, Address("somewhere", 5))
    turned = threading.Event()
    loop.call_soon(turned.set)
    assert turned.wait(1), "the control thread goes on"
    loop.call_soon(connector.cancel)
    answer.set()
    _, second = connect(loop, Address("elsewhere", 5))
    assert second.ended.wait(5) and second.reason == "cannot resolve 'elsewhere': no such host"
    assert result.count == 0, "a cancelled attempt reports nothing"


def test_cancelled_attempts_leave_no_descriptor(loop: ControlLoop) -> None:
    fds = len(os.listdir("/proc/self/fd"))
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        attempts = [connect(loop, Address("127.0.0.1", full.getsockname()[1])) for _ in range(10)]
        for connector, _ in attempts:
            loop.call_soon(connector.cancel)
            loop.call_soon(connector.cancel)
        done = threading.Event()
        loop.call_soon(done.set)
        assert done.wait(5)
        for _, result in attempts:
            if result.sock is not None:
                result.sock.close()
    assert len(os.listdir("/proc/self/fd")) == fds


def test_a_socket_connected_to_itself_is_recognised() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.connect(sock.getsockname())
        assert dialer._is_own_echo(sock)


def test_ipv4_through_a_listener_of_both_families_reads_as_ipv4() -> None:
    assert numeric(("::ffff:127.0.0.1", 80, 0, 0)) == Address("127.0.0.1", 80)
    assert str(numeric(("::1", 80, 0, 0))) == "[::1]:80"


def test_g3_a_name_that_no_thread_can_look_up_is_a_failure_at_once(loop: ControlLoop) -> None:
    with Shortage(1):
        _, result = connect(loop, Address("localhost", 1))
        assert result.ended.wait(5)
    assert result.sock is None and result.count == 1
    assert result.reason.startswith(
        "cannot resolve 'localhost': no thread can be started for llm-datadist-resolve"
    )
    assert "RLIMIT_NPROC" in result.reason


@pytest.mark.parametrize("first", [1, 2])
def test_g14_a_socket_that_is_not_to_be_had_is_a_failure_with_its_limit(
    loop: ControlLoop, listener: socket.socket, first: int
) -> None:
    address = Address("127.0.0.1", listener.getsockname()[1])
    with Shortage(first):
        _, result = connect(loop, address)
        assert result.ended.wait(5)
    assert result.sock is None and result.count == 1
    assert ("RLIMIT_NOFILE", "max_user_watches")[first - 1] in result.reason
    _, result = connect(loop, address)
    assert result.ended.wait(5) and result.sock is not None
    result.sock.close()
