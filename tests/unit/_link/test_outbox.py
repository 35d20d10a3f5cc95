"""The outbox: bytes leave once and in order, wherever a sending thread was interrupted."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from llm_datadist._core import limits
from llm_datadist._link.link import Link
from llm_datadist._link.outbox import CHUNKS_PER_CALL, Outbox
from llm_datadist._wire import messages as m
from llm_datadist._wire.framing import Buffer
from tests.support.raw_links import identity
from tests.support.steps import Steps


class Wire:
    """A socket that takes so many bytes at once. A call of C makes this in one step; here no step is looked at."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.taken = bytearray()

    def take(self, chunks: list[bytes]) -> int:
        sent = b"".join(bytes(chunk) for chunk in chunks)[: self.most]
        self.taken += sent
        return len(sent) if sent else -1


def send(outbox: Outbox, wire: Wire) -> None:
    outbox.forget_sent()
    while outbox:
        outbox.send(wire.take, outbox.first(2))
        outbox.forget_sent()


@pytest.mark.parametrize("most", [1, 3, 7, 1000])
def test_what_was_put_leaves_once_and_in_order(most: int) -> None:
    outbox, wire, put, rng = Outbox(), Wire(most), b"", random.Random(7)
    for _ in range(50):
        message = [rng.randbytes(rng.randrange(12)) for _ in range(rng.randrange(4))]
        put += b"".join(message)
        outbox.put(message)
        assert outbox.nbytes == len(put) - len(wire.taken)
        assert outbox.joined() == put[len(wire.taken) :]
        if rng.random() < 0.5:
            outbox.send(wire.take, outbox.first())
        if rng.random() < 0.5:
            outbox.forget_sent()
    send(outbox, wire)
    assert bytes(wire.taken) == put and not outbox and outbox.nbytes == 0 and not outbox.joined()


def test_one_call_gets_no_more_chunks_than_it_may() -> None:
    outbox = Outbox()
    outbox.put([b"x"] * (CHUNKS_PER_CALL + 5))
    assert len(outbox.first()) == CHUNKS_PER_CALL and len(outbox.joined()) == CHUNKS_PER_CALL + 5


def test_what_is_cleared_does_not_leave() -> None:
    outbox, wire = Outbox(), Wire(2)
    outbox.put([b"abc"])
    outbox.send(wire.take, outbox.first())
    outbox.clear()
    assert not outbox
    outbox.put([b"de"])
    assert outbox.joined() == b"de"


def test_g12_an_interrupt_at_any_step_sends_nothing_twice() -> None:
    number = 0
    while True:
        number += 1
        outbox, wire = Outbox(), Wire(5)
        outbox.put([b"0123456", b"", b"789"])
        steps = Steps(number, files="_link/outbox.py")
        interrupted = steps.run(lambda: send(outbox, wire))  # noqa: B023
        outbox.put([b"ab"])
        send(outbox, wire)
        assert bytes(wire.taken) == b"0123456789ab", steps.where
        if not interrupted:
            break
    assert number > 20


# ---- row G17 ------------------------------------------------------------------------------------------------

ENTRY = m.CacheEntry(cache_id=1, is_blocks=True, num_tensors=1, dim0=1, stride_nbytes=1, word=m.Word())
ANSWERS: list[m.Message] = [
    m.Done(id=1, code=0),
    m.Grant(id=1, lease_id=1, lease=m.Word(), entry=ENTRY),
    m.Found(id=1, entry=ENTRY),
    m.Release(lease_id=1),
]
OTHERS: list[m.Message] = [
    m.Announce(entry=ENTRY),
    m.Withdraw(cache_ids=(1,)),
    m.Finish(id=1),
]


class Carrier:
    """Notes what is owed."""

    def __init__(self) -> None:
        self.owed: list[bool] = []

    def post(self, chunks: Sequence[Buffer], *, owed: bool = False) -> None:
        self.owed.append(owed)


@pytest.mark.parametrize("message", [*ANSWERS, *OTHERS], ids=lambda message: type(message).__name__)
def test_g17_what_answers_a_peer_is_owed(message: m.Message) -> None:
    carrier: Any = Carrier()
    link = Link(
        carrier, identity(), b"", address="", dialled_address=None, is_self=False, reads_by=(), peer_reads_by=(),
        context=None, since=0.0,
    )  # fmt: skip
    link.post(message)
    assert carrier.owed == [message in ANSWERS]


def gone(outbox: Outbox, nbytes: int) -> None:
    outbox.send(lambda _: nbytes, b"")
    outbox.forget_sent()


def test_g17_answers_are_owed_until_they_are_sent() -> None:
    outbox = Outbox(lambda: 0)
    outbox.put([bytes(2 * limits.OWED_NBYTES)])
    assert not outbox.owes
    outbox.put([bytes(limits.OWED_NBYTES), b"x"], owed=True)
    assert outbox.owes
    gone(outbox, 2 * limits.OWED_NBYTES)
    assert outbox.owes
    gone(outbox, 1)
    assert not outbox.owes


def test_g17_room_on_one_link_and_on_all() -> None:
    elsewhere = limits.OUTBOXES_NBYTES
    outbox = Outbox(lambda: elsewhere)
    assert outbox.has_room(limits.OUTBOX_SURE_NBYTES) and not outbox.has_room(limits.OUTBOX_SURE_NBYTES + 1)
    elsewhere = 0
    assert outbox.has_room(limits.OUTBOX_NBYTES) and not outbox.has_room(limits.OUTBOX_NBYTES + 1)
    outbox.put([bytes(limits.OUTBOX_SURE_NBYTES)])
    assert not outbox.has_room(limits.OUTBOX_NBYTES)
    outbox.clear()
    assert not outbox and outbox.has_room(limits.OUTBOX_NBYTES)
