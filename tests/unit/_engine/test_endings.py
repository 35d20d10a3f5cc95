"""The owner's part in the end of a call: ready, then what its initiator has decided (G2, G21)."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llm_datadist._core import limits
from llm_datadist._core.limits import NOTIFICATIONS
from llm_datadist._core.notices import NoticeQueue
from llm_datadist._engine.endings import Endings
from llm_datadist._engine.notifications import Notifications
from llm_datadist._engine.receiver import ReceivedOffer, Receiver
from llm_datadist._engine.state import Peer, peer_of
from llm_datadist._wire.messages import Decided, Done, EndOffer, Finish
from llm_datadist.status import (
    LinkFailedError,
    LLMStatusCode,
    OutOfMemoryError,
    ParamInvalidError,
    TransferTimeoutError,
)
from tests.support.links_alone import link_alone

OK, FULL = LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_OUT_OF_MEMORY
SAID = [(7, "n", b"m")]


class Owner:
    """An owner without an engine: one lease, 3, of the key "k"."""

    def __init__(self, capacity: int = NOTIFICATIONS) -> None:
        way: Any = SimpleNamespace(caps=SimpleNamespace(one_sided=False, partial=False))
        self.link, self.carrier = link_alone(7, Peer((way,), ()))
        self.leases: dict[int, Any] = {3: SimpleNamespace(lease_id=3, key="k", record="r")}
        self.pulled: list[Any] = []
        self.turns: list[Any] = []
        lock = threading.Lock()
        state: Any = SimpleNamespace(
            lock=lock,
            condition=threading.Condition(lock),
            check_open=lambda: None,
            is_alone=lambda link: True,
            leases=SimpleNamespace(
                get=lambda number, holder, now: self.leases.get(number),
                end=lambda lease: self.leases.pop(lease.lease_id),
            ),
            links=SimpleNamespace(on_control_thread=lambda: False, call_at=self._turn),
        )
        allocator: Any = SimpleNamespace(pulled=lambda *what: self.pulled.append(what))
        queue = NoticeQueue(capacity)
        self.state, self.endings = state, Endings(state, allocator, queue)
        self.notifications = Notifications(state, queue, self.endings)

    def _turn(self, when: float, fn: Any) -> None:
        assert when <= time.monotonic()
        for read in self.turns:
            read()
        self.turns.clear()
        fn()

    def finish(self, **what: Any) -> None:
        what = {"notify": ("n", b"m"), "lease_id": 3, "first_tensor": 0, "tensor_stop": 2, **what}
        self.endings.finish(self.link, Finish(id=1, **what))

    def decide(self, ok: bool, number: int = 1) -> None:
        self.endings.decided(self.link, Decided(finish_id=number, ok=ok))

    @property
    def answers(self) -> list[int]:
        return [m.code for m in self.carrier.sent if isinstance(m, Done)]

    @property
    def said(self) -> list[tuple[int, str, bytes]]:
        kept: Any = SimpleNamespace(on_drop=lambda undo: None)
        return [(n.cluster_id, n.name, n.message) for n in self.notifications.take(kept)]


RELEASED = [("r", "k", 0, 2)]
DONE = Done(id=9, code=OK)


def test_g2_nothing_happens_before_the_decision() -> None:
    owner = Owner()
    owner.finish()
    assert (owner.answers, owner.leases) == ([OK], {}), "ready, and the lease has ended"
    assert (owner.said, owner.pulled) == ([], [])
    owner.decide(True)
    assert (owner.said, owner.pulled) == (SAID, RELEASED)
    owner.decide(True)
    owner.decide(False)
    assert (owner.said, owner.pulled, owner.endings.pending) == ([], RELEASED, False)


def test_g2_a_call_that_has_failed_does_nothing() -> None:
    owner = Owner()
    owner.finish()
    owner.decide(False)
    owner.decide(True)
    assert (owner.said, owner.pulled, owner.endings.pending) == ([], [], False)


def test_g2_a_full_queue_keeps_the_key() -> None:
    owner = Owner(capacity=0)
    owner.finish()
    owner.decide(True)
    assert (owner.answers, owner.pulled, owner.leases) == ([FULL], [], {})


@pytest.mark.parametrize(
    ("left", "said", "pulled"), [(False, SAID, RELEASED), (True, [], [])], ids=["lost", "goodbye"]
)
def test_g21_a_link_that_ends_first_decides(left: bool, said: Any, pulled: Any) -> None:
    owner = Owner()
    owner.finish()
    owner.link.peer_left = left
    owner.link.set_down("gone")
    owner.endings.link_down(owner.link)
    assert (owner.said, owner.pulled, owner.endings.pending) == (said, pulled, False)


def test_g2_what_is_fetched_has_what_had_come() -> None:
    """The decision lies in the socket when its sender's call has returned."""
    owner = Owner()
    owner.finish()
    owner.turns.append(lambda: owner.decide(True))
    assert owner.said == SAID


@pytest.mark.parametrize("notify", [None, ("n", b"m")])
def test_g2_a_lease_that_has_ended_releases_nothing_so_its_pull_fails(notify: Any) -> None:
    owner = Owner()
    owner.leases.clear()
    owner.finish(notify=notify)
    assert (owner.answers, owner.endings.pending) == ([LLMStatusCode.LLM_KV_CACHE_NOT_EXIST], False)


def test_g2_a_call_ends_once() -> None:
    owner = Owner()
    owner.finish()
    owner.finish(lease_id=0)
    owner.decide(True)
    assert (owner.answers, owner.pulled) == ([OK, LLMStatusCode.LLM_PARAM_INVALID], RELEASED)


def test_g17_a_peer_may_leave_so_many_reads_undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "UNDECIDED", 2)
    owner = Owner()
    for number in (3, 4, 5):
        owner.leases[number] = SimpleNamespace(lease_id=number, key="k", record="r")

    def finish(number: int) -> None:
        read: Any = {"notify": None, "lease_id": number, "first_tensor": 0, "tensor_stop": 2}
        owner.endings.finish(owner.link, Finish(id=number, **read))

    for number in (3, 4, 5):
        finish(number)
    assert owner.answers == [OK, OK, FULL]
    assert list(owner.leases) == [5], "what is refused changes nothing"
    owner.decide(False, 4)
    finish(5)
    assert owner.answers[3:] == [OK]


def test_a_lease_that_ends_counts_what_left() -> None:
    owner = Owner()
    owner.finish(nbytes=100)
    assert peer_of(owner.link).bytes_out == 100
    owner = Owner()
    owner.finish(lease_id=0, nbytes=100)
    assert peer_of(owner.link).bytes_out == 0, "nothing was read"


def test_g21_a_push_makes_its_end_ready_once() -> None:
    owner = Owner()
    owner.endings.park(owner.link, 1, "n", b"m", DONE)
    with pytest.raises(ParamInvalidError, match="asked for already"):
        owner.endings.park(owner.link, 1, "n", b"m", DONE)
    owner.decide(True)
    assert owner.said == SAID


def test_a_peer_is_held_to_the_limits() -> None:
    owner = Owner()
    owner.finish(notify=("n", b"m" * 65537))
    assert owner.answers == [LLMStatusCode.LLM_PARAM_INVALID]
    assert not owner.endings.pending
    with pytest.raises(ParamInvalidError, match=r"cluster 7.*65538"):
        owner.endings.park(owner.link, 1, "n" * 65538, b"", DONE)
    for number in range(NOTIFICATIONS):
        owner.endings.park(owner.link, number, "n", b"", DONE)
    with pytest.raises(OutOfMemoryError):
        owner.endings.park(owner.link, NOTIFICATIONS, "n", b"", DONE)


def pushed(owner: Owner) -> tuple[Receiver, ReceivedOffer]:
    none: Any = np.empty(0, np.uint64)
    offer: Any = SimpleNamespace(id=1, notify=("n", b"m"), kind="blocks")
    source: Any = None
    return Receiver(owner.state, owner.endings), ReceivedOffer(owner.link, offer, source, none, none, none)


@pytest.mark.parametrize("ok", [True, False])
def test_g2_a_push_says_what_its_initiator_decides(ok: bool) -> None:
    owner = Owner()
    receiver, received = pushed(owner)
    receiver._answer(received, DONE)
    assert owner.said == []
    receiver.end(owner.link, EndOffer(offer_id=1, ok=ok))
    owner.decide(ok)
    receiver.end(owner.link, EndOffer(offer_id=1, ok=ok))
    assert owner.said == (SAID if ok else [])


def test_a_push_that_was_withdrawn_says_nothing() -> None:
    """Its data is there, but its initiator has reported a time-out."""
    owner = Owner()
    receiver, received = pushed(owner)
    received.ended = True
    with pytest.raises(TransferTimeoutError, match="withdrawn"):
        receiver._answer(received, DONE)
    assert not owner.endings.pending


def test_g21_a_push_whose_link_is_down_makes_nothing_ready() -> None:
    owner = Owner()
    receiver, received = pushed(owner)
    owner.link.set_down("gone")
    with pytest.raises(LinkFailedError, match="gone"):
        receiver._answer(received, DONE)
    assert not owner.endings.pending
