"""The moments between a notification and its answer that no process can be stopped in."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llm_datadist._core.notices import QUEUE_CAPACITY, Notice
from llm_datadist._engine.failures import Context
from llm_datadist._engine.flights import Flight
from llm_datadist._engine.notifications import Notifications
from llm_datadist._engine.receiver import ReceivedOffer, Receiver
from llm_datadist._link.link import LinkLost
from llm_datadist._wire.messages import Done, EndNotify, Notify
from llm_datadist.status import LLMStatusCode, OutOfMemoryError, ParamInvalidError, TransferTimeoutError

OK, TIMEOUT = LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_TIMEOUT


class FakePending:
    """Answers what it is told: an exception is raised, a code is Done."""

    def __init__(self, link: FakeLink, answers: list[Any]) -> None:
        self._link, self._answers = link, answers

    def wait(self, deadline: float) -> Any:
        answer = self._answers.pop(0)
        self._link.told.append("wait")
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(message=Done(id=1, code=answer, text="said so"))

    def discard(self) -> None:
        self._link.told.append("discard")

    def finish(self, frame: object, lost: str) -> None:
        self._link.told.append(lost)


class FakeLink:
    """Records what is sent."""

    cluster_id, address, down_reason, context = 7, "10.0.0.1:1", None, None

    def __init__(self, *answers: Any) -> None:
        self.told: list[Any] = []
        self._answers = list(answers)

    def next_id(self) -> int:
        return 1

    def call(self, message: Any) -> FakePending:
        self.told.append(message)
        return FakePending(self, self._answers)

    def send(self, message: Any, attachments: Any = ()) -> None:
        self.told.append(message)


class FakeState:
    """What a Notifications uses of an engine; ``turns`` are calls for the next turn of the control thread."""

    grace_s = 0.0

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.turns: list[Any] = []
        self.links = SimpleNamespace(call_soon=self.turns.append)

    def check_open(self) -> None:
        pass


def made() -> tuple[Any, Notifications]:
    state: Any = FakeState()
    return state, Notifications(state)


def deliver(link: FakeLink, notifications: Notifications) -> None:
    peer: Any = link
    context = Context("it", peer, time.monotonic(), TIMEOUT)
    notifications.deliver(Flight(peer, ()), context, Notice("n", b"m"), 0.0)


SENT, END = Notify(id=1, name="n", message=b"m"), EndNotify(notify_id=1)


def test_an_answer_after_the_time_decides() -> None:
    """The withdrawal goes out first, so that the answer is final."""
    link = FakeLink(TimeoutError(), OK)
    deliver(link, made()[1])
    assert link.told == [SENT, "wait", END, "wait"]
    link = FakeLink(TimeoutError(), TIMEOUT)
    with pytest.raises(TransferTimeoutError, match="said so"):
        deliver(link, made()[1])


@pytest.mark.parametrize("last", [TimeoutError(), LinkLost("gone")])
def test_no_answer_at_all_is_withdrawn_once_more_and_raised(last: Exception) -> None:
    link = FakeLink(TimeoutError(), last)
    with pytest.raises(type(last)):
        deliver(link, made()[1])
    assert link.told == [SENT, "wait", END, "wait", END, "discard"]


def test_what_came_with_its_withdrawal_reaches_nobody() -> None:
    state, notifications = made()
    link: Any = FakeLink()
    notifications.received(link, SENT)
    assert notifications.take() == []
    notifications.withdrawn(link, END)
    state.turns.pop()()
    assert notifications.take() == []
    assert [(m.id, m.code) for m in link.told] == [(1, TIMEOUT)]
    notifications.received(link, SENT)
    state.turns.pop()()
    notifications.withdrawn(link, END)
    assert [(m.id, m.code) for m in link.told[1:]] == [(1, OK)]
    assert [(n.cluster_id, n.name, n.message) for n in notifications.take()] == [(7, "n", b"m")]


def test_what_came_over_a_link_that_is_down_reaches_nobody() -> None:
    state, notifications = made()
    link: Any = FakeLink()
    notifications.received(link, SENT)
    link.down_reason = "reset"
    state.turns.pop()()
    assert (notifications.take(), link.told) == ([], [])


def test_a_peer_is_held_to_the_limits() -> None:
    state, notifications = made()
    link: Any = FakeLink()
    notifications.received(link, Notify(id=1, name="n", message=b"m" * 65537))
    (answer,) = link.told
    assert (answer.code, "65537" in answer.text, state.turns) == (LLMStatusCode.LLM_PARAM_INVALID, True, [])
    with pytest.raises(ParamInvalidError, match=r"cluster 7.*65538"):
        notifications.enter(link, "n" * 65538, b"")
    for _ in range(QUEUE_CAPACITY):
        notifications.enter(link, "n", b"")
    with pytest.raises(OutOfMemoryError):
        notifications.enter(link, "n", b"")


def test_a_push_that_was_withdrawn_says_nothing() -> None:
    """Its data is there, but its initiator has reported a time-out."""
    state, notifications = made()
    receiver = Receiver(state, notifications)
    none: Any = np.empty(0, np.uint64)
    link: Any = FakeLink()
    offer: Any = SimpleNamespace(notify=("n", b"m"), kind="blocks")
    received = ReceivedOffer(link, offer, link, none, none, none)
    receiver._notify(received)
    assert len(notifications.take()) == 1
    received.ended = True
    with pytest.raises(TransferTimeoutError, match="withdrawn"):
        receiver._notify(received)
    assert notifications.take() == []
