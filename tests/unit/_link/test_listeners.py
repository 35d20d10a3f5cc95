"""Several listening ports in one engine: shared, counted, moved."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from llm_datadist._link.listener import find_place
from llm_datadist._link.listeners import Listeners
from llm_datadist._link.loop import ControlLoop
from llm_datadist._link.seam import Address
from llm_datadist.status import LLMException, LLMStatusCode
from tests.support.rank_tables import free_ports

HOST = "127.0.0.1"


@pytest.fixture
def listeners() -> Iterator[Listeners]:
    loop = ControlLoop("test")  # open, never started: everything runs in the test's thread
    loop.open()
    them = Listeners(loop, lambda sock, peer: sock.close(), lambda *_: None)
    yield them
    them.close()
    loop.stop(1.0)


def answers(port: int, host: str = HOST) -> bool:
    try:
        socket.create_connection((host, port), 1.0).close()
    except OSError:
        return False
    return True


def test_two_that_want_one_address_share_it_and_the_last_closes_it(listeners: Listeners) -> None:
    (port,) = free_ports(1)
    first = listeners.hold([Address(HOST, port)])
    second = listeners.hold([Address(HOST, port)])
    assert first.addresses == second.addresses == (Address(HOST, port),)
    listeners.release(first)
    assert answers(port)
    listeners.release(second)
    assert not answers(port)
    assert listeners.first is None


@pytest.mark.rule("4.63")
def test_only_local_addresses_are_held(listeners: Listeners) -> None:
    (port,) = free_ports(1)
    wanted = [Address(h, port) for h in ("192.0.2.1", HOST, "2001:db8::1", "fe80::1%nowhere")]
    assert listeners.hold(wanted).addresses == (Address(HOST, port),)
    assert listeners.hold([Address("192.0.2.1", port)]).addresses == ()
    assert listeners.main is None
    assert listeners.first == Address(HOST, port)


def test_an_address_in_use_by_another_matters_only_if_it_is_the_last(listeners: Listeners) -> None:
    with socket.create_server((HOST, 0)) as other:
        port = other.getsockname()[1]
        held = listeners.hold([Address(HOST, port), Address("127.0.0.2", port)])
        assert held.addresses == (Address("127.0.0.2", port),)
        with pytest.raises(LLMException, match=rf"{HOST}:{port}.*in use") as caught:
            listeners.hold([Address(HOST, port), Address("192.0.2.1", port)])
    assert caught.value.status_code == LLMStatusCode.LLM_FAILED


@pytest.mark.rule("4.110")
@pytest.mark.parametrize(
    ("bound", "wanted", "shared"),
    [("0.0.0.0", HOST, True), ("::", HOST, True), ("::", "::1", True), (HOST, "127.0.0.2", False)],
)
def test_a_wildcard_holds_its_parts(bound: str, wanted: str, shared: bool, listeners: Listeners) -> None:
    (port,) = free_ports(1, bound)
    listeners.listen_on(find_place(Address(bound, port)))
    held = listeners.hold([Address(wanted, port)])
    assert (held.addresses == (Address(bound, port),)) is shared
    listeners.listen_on(None)
    assert answers(port, wanted), "it is still held"
    listeners.release(held)
    assert not answers(port, wanted)


def test_ipv4_alone_does_not_hold_ipv6(listeners: Listeners) -> None:
    (port,) = free_ports(1, "::1")
    listeners.listen_on(find_place(Address("0.0.0.0", port)))
    assert listeners.hold([Address("::1", port)]).addresses == (Address("::1", port),)


def test_listen_on_moves_and_the_same_again_is_nothing(listeners: Listeners) -> None:
    listeners.listen_on(find_place(Address(HOST, 0)))
    first = listeners.main
    assert first is not None and answers(first.port)
    listeners.listen_on(find_place(Address(HOST, 0)))
    assert listeners.main == first, "any free port: it has one"
    listeners.listen_on(find_place(first))
    assert listeners.main == first
    listeners.listen_on(find_place(Address("0.0.0.0", first.port)))
    assert listeners.main == Address("0.0.0.0", first.port)
    assert answers(first.port, "127.0.0.2")
    (port,) = free_ports(1)
    listeners.listen_on(find_place(Address(HOST, port)))
    assert answers(port) and not answers(first.port)
    listeners.listen_on(None)
    assert listeners.main is None and not answers(port)


@pytest.mark.parametrize("same_port", [True, False])
def test_listen_on_that_fails_changes_nothing(same_port: bool, listeners: Listeners) -> None:
    listeners.listen_on(find_place(Address(HOST, 0)))
    before = listeners.main
    assert before is not None
    with socket.create_server(("127.0.0.2", before.port if same_port else 0)) as other:
        wanted = Address("127.0.0.2", other.getsockname()[1])
        with pytest.raises(LLMException, match="in use"):
            listeners.listen_on(find_place(wanted))
        assert listeners.main == before and answers(before.port)
    listeners.listen_on(find_place(wanted))
    assert listeners.main == wanted, "the failed attempt does not count as where it listens"


def test_release_after_close_is_nothing(listeners: Listeners) -> None:
    (port,) = free_ports(1)
    held = listeners.hold([Address(HOST, port)])
    listeners.close()
    listeners.release(held)
    assert not answers(port)
