"""The inbox: what would be answered waits for a peer that does not read its answers, all else goes on."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from llm_datadist._core import limits
from llm_datadist._link.inbox import Inbox
from llm_datadist._link.outbox import Outbox
from llm_datadist._wire import messages as m
from llm_datadist._wire.framing import encode
from llm_datadist._wire.session import AnswerIn, Closed, Event, MessageIn, Session
from tests.support.raw_links import hello, identity

MOST = 1 << 20
KEY = m.KeyRef(kind="cache", id=1)
ENTRY = m.CacheEntry(cache_id=1, is_blocks=True, num_tensors=1, dim0=1, stride_nbytes=1, word=m.Word())
GRANT = m.Grant(id=9, lease_id=1, lease=m.Word(), entry=ENTRY)


class Scene:
    """The inbox of a link that is up; it waits for the answers that are ``expected``."""

    def __init__(self) -> None:
        self.session = Session(identity(1), 0.0)
        self.session.receive(wire([hello(1, identity(9))]), 0.0)
        self.session.welcome(bytes(16), bytes(16), {})
        self.session.receive(wire([m.Confirm(reads_by=())]), 0.0)
        self.session.establish(0.0, ())
        self.session.outgoing()
        self.outbox = Outbox()
        self.expected: set[int] = set()
        self.inbox = Inbox(self.session, self.outbox, lambda number: number in self.expected)

    def owe(self) -> None:
        self.outbox.put([bytes(limits.OWED_NBYTES + 1)], owed=True)

    def hear(self, *messages: m.Message, most: int = MOST) -> list[m.Message]:
        """What of these, and of what was there, is to be handled now; a Pong that is said instead of its Ping."""
        handled: list[m.Message] = []
        data, more = wire(messages), True
        while more:
            handled += map(_message, self.inbox.receive(data, 0.0, most))
            handled += [m.Pong(id=0)] * bool(self.session.outgoing())
            data, more = b"", self.inbox.more
        return handled


def wire(messages: Sequence[m.Message]) -> bytes:
    return b"".join(bytes(chunk) for message in messages for chunk in encode(message))


def _message(event: Event) -> m.Message:
    if isinstance(event, Closed):
        return m.Bye(text=event.reason)
    assert isinstance(event, MessageIn | AnswerIn)
    return event.frame.message


@pytest.fixture
def scene() -> Scene:
    return Scene()


QUESTIONS: list[m.Message] = [
    m.Ping(id=1),
    m.Unlink(id=1, time_left_ms=1),
    m.Settle(id=1, time_left_ms=1),
    m.Resolve(id=1, key=KEY, time_left_ms=1),
    m.Lookup(id=1, key=KEY),
    m.PartReady(id=1, offer_id=1, part=0, lease_id=1, lease=m.Word(), time_left_ms=1),
    m.Finish(id=1, notify=("x", b"")),
    GRANT,
]
OTHERS: list[m.Message] = [
    m.Done(id=7, code=0),
    m.Pong(id=7),
    m.Found(id=7, entry=ENTRY),
    m.Release(lease_id=1),
    m.Announce(entry=ENTRY),
    m.Withdraw(cache_ids=(1,)),
    m.Publish(entry=ENTRY),
    m.Offer(id=1, kind="blocks", source_id=1, part_tensors=1),
    m.EndOffer(offer_id=1),
    m.NeedConnections(count=1),
    m.Decided(finish_id=5, ok=True),
]


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda q: type(q).__name__)
def test_g17_what_would_be_answered_waits_while_answers_are_not_read(
    scene: Scene, question: m.Message
) -> None:
    """And what comes behind it, which is not answered, does not."""
    answered = m.Pong(id=0) if isinstance(question, m.Ping) else question
    assert scene.hear(question) == [answered]
    scene.owe()
    assert scene.hear(question, *OTHERS) == OTHERS
    assert scene.inbox.holds and not scene.inbox.more and not scene.inbox.is_full
    scene.outbox.clear()
    assert scene.inbox.more
    assert scene.hear() == [answered]
    assert not scene.inbox.holds and scene.inbox.waiting_nbytes == 0


def test_g17_bytes_that_came_just_before_the_peer_read_its_answers_are_taken(scene: Scene) -> None:
    """Another thread sends, and finds that out, between a look at ``more`` and what comes of it."""
    first, second = m.Unlink(id=1, time_left_ms=1), m.Unlink(id=2, time_left_ms=1)
    scene.owe()
    assert scene.hear(first) == [] and not scene.inbox.more
    scene.outbox.clear()
    assert scene.hear(second) == [first, second]


def test_a_lease_that_somebody_waits_for_is_an_answer(scene: Scene) -> None:
    scene.expected.add(GRANT.id)
    scene.owe()
    assert scene.hear(GRANT) == [GRANT]


def test_questions_keep_their_order(scene: Scene) -> None:
    """Also with those that come when there is room again, and a few at a time."""
    questions = [m.Settle(id=number, time_left_ms=1) for number in range(7)]
    scene.owe()
    assert scene.hear(*questions[:5]) == []
    scene.outbox.clear()
    inbox = scene.inbox
    assert [_message(event) for event in inbox.receive(b"", 0.0, 2)] == questions[:2]
    assert scene.hear(most=1) == questions[2:5]
    assert scene.hear(*questions[5:]) == questions[5:]
    assert inbox.taken == len(questions) + 5 + 2, "the handshake has two"


def test_a_question_does_not_overtake_those_that_wait(scene: Scene) -> None:
    """Another thread may make room at any time."""
    first, between, last = m.Lookup(id=1, key=KEY), m.Release(lease_id=1), m.Lookup(id=2, key=KEY)
    scene.owe()
    events = scene.inbox.receive(wire([first, between, last]), 0.0, MOST)
    assert _message(next(events)) == between
    scene.outbox.clear()
    assert list(events) == []
    assert scene.hear() == [first, last]


def test_those_that_wait_go_on_until_so_much_is_owed_again(scene: Scene) -> None:
    first, second = m.Lookup(id=1, key=KEY), m.Lookup(id=2, key=KEY)
    scene.owe()
    assert scene.hear(first, second) == []
    scene.outbox.clear()
    events = scene.inbox.receive(b"", 0.0, MOST)
    assert _message(next(events)) == first
    scene.owe()  # by its answer
    assert list(events) == [] and scene.inbox.holds
    scene.outbox.clear()
    assert scene.hear() == [second]


def test_a_decision_does_not_overtake_what_it_decides(scene: Scene) -> None:
    """It may come without an answer: the call has failed. Of others, whose calls have ended, nothing waits."""
    finish, decided = m.Finish(id=3, notify=("x", b"")), m.Decided(finish_id=3, ok=False)
    other = m.Decided(finish_id=2, ok=True)
    scene.owe()
    assert scene.hear(finish, decided, other) == [other]
    scene.outbox.clear()
    assert scene.hear() == [finish, decided]
    scene.owe()
    assert scene.hear(decided) == [decided]


def test_a_goodbye_does_not_wait(scene: Scene) -> None:
    scene.owe()
    assert scene.hear(m.Ping(id=1), m.Bye(text="enough")) == [m.Bye(text="the peer dropped the link: enough")]


@pytest.mark.parametrize("text", [b"", bytes(limits.NOTIFY_NBYTES)], ids=["short", "long"])
def test_g17_what_waits_is_bounded(scene: Scene, monkeypatch: pytest.MonkeyPatch, text: bytes) -> None:
    monkeypatch.setattr(limits, "HELD_NBYTES", 1 << 20)
    scene.owe()
    count = 0
    while not scene.inbox.is_full:
        assert scene.hear(m.Finish(id=count, notify=("x", text))) == []
        count += 1
    nbytes = (1 << 10) + len(text)
    assert 0.9 * nbytes * count < scene.inbox.waiting_nbytes < (1 << 20) + 2 * nbytes
    scene.outbox.clear()
    assert not scene.inbox.is_full
    assert len(scene.hear()) == count
