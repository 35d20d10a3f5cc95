"""What a call of ours owes its peer is settled once the flight has ended, by whatever it was (G1, G2)."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from llm_datadist._engine.failures import Context, Refusal
from llm_datadist._engine.flights import Flight
from llm_datadist._engine.obligations import Decision, Ending, LeaseHold, give_back
from llm_datadist._link.link import LinkLost
from llm_datadist._wire.messages import (
    CacheEntry,
    Decided,
    Done,
    Finish,
    Grant,
    KeyRef,
    Release,
    Resolve,
    Word,
)
from llm_datadist.status import CacheNotExistError, LinkFailedError, LLMStatusCode, OutOfMemoryError
from tests.support.links_alone import Carrier, frame, link_alone

OK, FULL, TIMEOUT = LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_OUT_OF_MEMORY, LLMStatusCode.LLM_TIMEOUT


class Call:
    """The end of a call; ``come`` is what the peer says while it is asked."""

    def __init__(self, *come: Any) -> None:
        self.link, self.carrier = link_alone()
        self.flight = Flight(self.link, ())
        self._come = come
        post = self.carrier.post

        def posted(chunks: Any, **more: Any) -> None:
            post(chunks)
            if isinstance(self.carrier.sent[-1], Finish):
                for event in self._come:
                    event(self)

        self.carrier.post = posted  # type: ignore[method-assign]

    def run(self, deadline: float = 0.0) -> None:
        context = Context("it", self.link, time.monotonic(), TIMEOUT)
        Ending(self.flight).run(lambda number: Finish(id=number, notify=("n", b"m")), context, deadline)

    @property
    def said(self) -> list[bool]:
        return [m.ok for m in self.carrier.sent if isinstance(m, Decided)]


def ready(call: Call, code: int = OK) -> None:
    call.link.answer(1, frame(Done(id=1, code=code, text="said so")))


def full(call: Call) -> None:
    ready(call, FULL)


def cut(call: Call) -> None:
    call.flight.cut(OutOfMemoryError("cut"))


def down(call: Call) -> None:
    call.link.set_down("gone")


def goodbye(call: Call) -> None:
    call.link.peer_left = True
    call.link.set_down("it said goodbye")


def leave(call: Call) -> None:
    call.link.leave("we drop it")


def test_g2_a_peer_that_is_ready_hears_of_the_success() -> None:
    call = Call(ready, cut)
    call.run()
    call.flight.settle()
    assert call.said == [True], "a cut that comes after the answer is too late"


@pytest.mark.parametrize(
    ("come", "error"),
    [((), TimeoutError), ((cut,), LinkLost), ((cut, ready), LinkLost), ((full,), OutOfMemoryError)],
)
def test_g2_whatever_else_ends_it_the_peer_hears_of_the_failure(come: Any, error: type[Exception]) -> None:
    call = Call(*come)
    with pytest.raises(error):
        call.run()
    call.flight.settle()
    call.flight.settle()
    ready(call)
    assert call.said == [False]


def test_g2_an_answer_at_the_last_moment_counts() -> None:
    call = Call()

    def meanwhile() -> bool:
        """Between a look at the answer and the end of the wait for it."""
        ready(call)
        return False

    call.carrier.on_control_thread = meanwhile  # type: ignore[method-assign]
    call.run()
    assert call.said == [True]


def test_g21_a_success_that_the_peer_may_not_hear_of_is_none() -> None:
    call = Call(ready, leave)
    with pytest.raises(LinkLost, match="dropped by this side"):
        call.run()


def ended(call: Call) -> None:
    ready(call, LLMStatusCode.LLM_KV_CACHE_NOT_EXIST)


def test_g4_a_lease_that_ended_with_the_time_of_its_pull_is_a_time_out() -> None:
    with pytest.raises(TimeoutError):
        Call(ended).run(time.monotonic())
    with pytest.raises(CacheNotExistError):
        Call(ended).run(time.monotonic() + 60)


@pytest.mark.parametrize("event", [down, goodbye])
def test_g21_a_peer_that_loses_the_link_before_it_hears_does_its_part(event: Any) -> None:
    call = Call(ready, event)
    call.run()


def test_g9_a_refusal_is_the_cause() -> None:
    call = Call(full)
    with pytest.raises(OutOfMemoryError, match="said so") as caught:
        call.run()
    cause = caught.value.__cause__
    assert isinstance(cause, Refusal)
    assert (cause.code, cause.text) == (FULL, "said so")


def test_g15_an_answer_of_another_kind_is_no_success() -> None:
    call = Call(lambda call: call.link.answer(1, frame(Decided(finish_id=1, ok=True))))
    with pytest.raises(LinkFailedError, match="unexpected answer Decided"):
        call.run(time.monotonic() + 60)


def test_g2_the_first_word_counts() -> None:
    link, carrier = link_alone()
    decision = Decision(link, lambda ok: Decided(finish_id=1, ok=ok))
    decision.settle()
    assert decision.make(ok=True) is False
    assert [m.ok for m in carrier.sent if isinstance(m, Decided)] == [False]


def asked() -> tuple[LeaseHold, Carrier, Any]:
    link, carrier = link_alone()
    hold = LeaseHold(link)
    link.ask(hold.pending, Resolve(id=hold.pending.id, key=KeyRef(kind="req"), time_left_ms=1))
    entry = CacheEntry(cache_id=1, is_blocks=False, num_tensors=1, dim0=1, stride_nbytes=1, word=Word())
    grant = Grant(id=hold.pending.id, lease_id=9, lease=Word(), entry=entry)

    def come() -> None:
        if not link.answer(grant.id, frame(grant)):
            give_back(link, grant)  # as the handler does

    return hold, carrier, come


@pytest.mark.parametrize("order", ["come settle", "settle come", "cut come settle", "come cut settle"])
def test_g1_a_lease_is_given_back_whenever_its_grant_comes(order: str) -> None:
    hold, carrier, come = asked()
    steps = {"come": come, "settle": hold.settle, "cut": lambda: hold.pending.fail("cut")}
    for step in order.split():
        steps[step]()
    hold.settle()
    assert [m.lease_id for m in carrier.sent if isinstance(m, Release)] == [9]


def test_a_lease_that_ends_otherwise_is_not_given_back() -> None:
    hold, carrier, come = asked()
    come()
    hold.end_elsewhere()
    hold.settle()
    assert not [m for m in carrier.sent if isinstance(m, Release)]


def test_g7_what_was_interrupted_is_settled_again() -> None:
    calls: list[str] = []
    flight = Flight(SimpleNamespace(), ())  # type: ignore[arg-type]
    flight.owes(lambda: calls.append("first"))
    flight.owes(lambda: calls.append("second"))
    flight.settle()
    assert calls == ["second", "first"]
