"""Transport ``shm``: memory is given to the other end of this very connection, once."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import msgspec
import pytest

from llm_datadist._core import limits
from llm_datadist.testing.board import extents
from llm_datadist.transports._meeting import meet
from llm_datadist.transports.movers import Movers
from llm_datadist.transports.seam import Fault, TransportUnavailable
from llm_datadist.transports.shm import ShmTransport
from tests.support.local_pair import PROOF, Loop
from tests.support.shm_pair import MIB, Reader, Shared, endpoint, settle, transport
from tests.support.world import wait_until

OTHER = PROOF[::-1]


@pytest.fixture
def area() -> Iterator[Shared]:
    with closing(Shared(MIB)) as area:
        yield area


@pytest.fixture
def reader(area: Shared) -> Iterator[ShmTransport]:
    with closing(transport([area.area])) as reader:
        yield reader


@pytest.fixture
def owned(area: Shared) -> Iterator[ShmTransport]:
    """With a control thread."""
    with closing(Loop()) as loop, closing(transport([area.area], loop=loop)) as owned:
        yield owned


def told(reader: ShmTransport, blob: bytes, proof: bytes = PROOF) -> str:
    """What comes of it: "" where the memory has come."""
    channel = reader.open(replace(endpoint(blob), proof=proof), deadline=0)
    settle(channel)
    return channel.refusal


@pytest.mark.rule("S.15")
def test_g16_another_proof_gets_nothing_but_the_reason(
    area: Shared, reader: ShmTransport, owned: ShmTransport
) -> None:
    """A peer shows what another process told it: it may name that one, but not what that one has made."""
    lie = msgspec.msgpack.encode({**msgspec.msgpack.decode(owned.endpoint(OTHER)), "proof": PROOF})
    channel = reader.open(endpoint(lie), deadline=0)
    settle(channel)
    assert not channel.covers(extents([area.area.address], [(0, 8)]))
    assert "the peer refused: what this process shows is not the proof" in channel.refusal
    assert isinstance(channel.read_word(area.area.address, deadline=0), Fault)


def test_g16_an_endpoint_of_another_connection(reader: ShmTransport) -> None:
    with pytest.raises(TransportUnavailable, match="this very connection"):
        reader.open(endpoint(reader.endpoint(OTHER)), deadline=0)


@pytest.mark.rule("S.15")
def test_g16_a_proof_is_good_once_and_until_the_handshake_is_over(
    reader: ShmTransport, owned: ShmTransport
) -> None:
    blob = owned.endpoint(PROOF)
    assert not told(reader, blob)
    assert "or it was shown before" in told(reader, blob)
    owned.endpoint(PROOF)
    owned.hide(PROOF)
    assert "or it was shown before" in told(reader, blob)


def test_g16_who_has_shown_its_proof_is_answered_before_the_handshake_is_over(reader: ShmTransport) -> None:
    """The owner's control thread may find the end of the handshake before it finds the reader."""
    # Nobody but the test is the owner's control thread: two at once would each have half of an answer.
    with closing(Shared(MIB)) as other, closing(Reader([other.area], Movers(0), deaf=True)) as silent:
        channels = [reader.open(endpoint(silent.endpoint(PROOF)), deadline=0)]
        silent.hide(PROOF)
        hear, silent._giver._hear = silent._giver._hear, lambda sock: None  # type: ignore[method-assign]
        later = replace(endpoint(silent.endpoint(OTHER)), proof=OTHER)
        channels.append(reader.open(later, deadline=0))
        silent._meeting.accept()
        silent._giver._hear = hear  # type: ignore[method-assign]
        silent.hide(OTHER)
        for channel in channels:
            settle(channel)
            assert not channel.refusal


def test_g17_of_many_who_show_nothing_the_oldest_go(
    reader: ShmTransport, owned: ShmTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SILENT_READERS", 2)
    name = msgspec.msgpack.decode(owned.endpoint(OTHER))["name"]
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(meet(name, socket.SOCK_SEQPACKET)) for _ in range(5)]
        assert wait_until(lambda: sum(map(has_ended, silent)) == 3)
        assert not has_ended(silent[3]) and not has_ended(silent[4])
        assert not told(reader, owned.endpoint(PROOF)), "others are answered"


def has_ended(sock: socket.socket) -> bool:
    try:
        return not sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
