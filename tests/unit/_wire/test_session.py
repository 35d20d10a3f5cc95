"""The protocol of one connection: every way through the table, every missing entry, every timer."""

from __future__ import annotations

import typing
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from llm_datadist._core import limits
from llm_datadist._wire import messages as m
from llm_datadist._wire import session as s
from llm_datadist._wire.framing import Decoder, encode
from llm_datadist._wire.session import Session, State

A = m.Identity(
    cluster_id=1, instance=b"a" * 16, role=1, accessible=False, heartbeat_ms=1000, link_timeout_ms=5000
)
B = m.Identity(
    cluster_id=2, instance=b"b" * 16, role=2, accessible=False, heartbeat_ms=500, link_timeout_ms=9000
)
CHALLENGE = b"c" * 16
HELLO = m.Hello(version=m.PROTOCOL_VERSION, target_id=2, identity=A, challenge=CHALLENGE)
TOKEN = b"t" * 16
SHOWN = {"x": b"y"}
WELCOME = m.Welcome(identity=B, seed=TOKEN, challenge=CHALLENGE, endpoints=SHOWN)
PLAIN: dict[object, object] = {int: 1, bytes: b"x" * 16, str: "x", bool: True, m.Identity: A}


def sample(kind: type[msgspec.Struct]) -> Any:
    """A value of that type, made from the types of its fields."""
    values = {f.name: value_of(f.type) for f in msgspec.structs.fields(kind) if f.required}
    return kind(**values)


def value_of(hint: Any) -> object:
    if typing.get_origin(hint) is typing.Annotated:
        hint = typing.get_args(hint)[0]
    if hint in PLAIN:
        return PLAIN[hint]
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return sample(hint)
    return () if typing.get_origin(hint) is tuple else None


MESSAGES = {kind: sample(kind) for kind in typing.get_args(m.AnyMessage)}


def wire(*messages: m.Message) -> bytes:
    return b"".join(b"".join(encode(message)) for message in messages)


def said(session: Session) -> list[m.Message]:
    data = b"".join(bytes(chunk) for chunk in session.outgoing())
    return [frame.message for frame in Decoder().feed(data)]


def dialler() -> Session:
    return Session(A, 0.0, hello=HELLO)


def preparing() -> Session:
    session = dialler()
    session.receive(wire(WELCOME), 0.0)
    return session


def awaiting_established() -> Session:
    session = preparing()
    session.confirm(("y",), SHOWN)
    return session


def up_dialler() -> Session:
    session = awaiting_established()
    session.receive(wire(m.Established(reads_by=("x",))), 0.0)
    session.outgoing()
    return session


def acceptor() -> Session:
    return Session(B, 0.0)


def checking() -> Session:
    session = acceptor()
    session.receive(wire(HELLO), 0.0)
    return session


def awaiting_confirm() -> Session:
    session = checking()
    session.welcome(TOKEN, CHALLENGE, SHOWN)
    return session


def committing() -> Session:
    session = awaiting_confirm()
    session.receive(wire(m.Confirm(reads_by=("y",), endpoints=SHOWN)), 0.0)
    return session


def up_acceptor() -> Session:
    session = committing()
    session.establish(0.0, ("x",))
    session.outgoing()
    return session


MAKERS: dict[State, Callable[[], Session]] = {
    State.AWAIT_FIRST: acceptor,
    State.CHECKING: checking,
    State.AWAIT_CONFIRM: awaiting_confirm,
    State.COMMITTING: committing,
    State.AWAIT_WELCOME: dialler,
    State.PREPARING: preparing,
    State.AWAIT_ESTABLISHED: awaiting_established,
    State.UP: up_acceptor,
}


def test_the_way_of_a_dialler() -> None:
    session = dialler()
    assert said(session) == [HELLO]
    assert session.receive(wire(WELCOME), 1.0) == [s.WelcomeIn(WELCOME)]
    assert session.peer == B
    session.confirm(("y",), SHOWN)
    assert said(session) == [m.Confirm(reads_by=("y",), endpoints=SHOWN)]
    events = session.receive(wire(m.Established(reads_by=("x",)), m.Unlink(id=1, time_left_ms=5)), 2.0)
    assert events[0] == s.EstablishedIn(m.Established(reads_by=("x",)))
    assert isinstance(events[1], s.MessageIn) and events[1].frame.message == m.Unlink(id=1, time_left_ms=5)
    assert session.state is State.UP


def test_the_way_of_an_acceptor() -> None:
    session = acceptor()
    assert session.receive(wire(HELLO), 1.0) == [s.HelloIn(HELLO)]
    session.welcome(TOKEN, CHALLENGE, SHOWN)
    assert said(session) == [WELCOME]
    confirm = m.Confirm(reads_by=("y",), endpoints=SHOWN)
    assert session.receive(wire(confirm), 2.0) == [s.ConfirmIn(confirm)]
    session.establish(2.0, ("x",))
    assert said(session) == [m.Established(reads_by=("x",))]
    assert session.state is State.UP


def test_a_data_connection_is_handed_over_with_its_first_bytes() -> None:
    session = acceptor()
    hello = m.DataHello(version=m.PROTOCOL_VERSION, link_token=TOKEN, dialler_reads=True)
    assert session.receive(wire(hello) + b"\xff raw", 0.0) == [s.DataIn(hello, b"\xff raw")]
    assert session.receive(b"more", 0.0) == [] and session.get_timer() is None


def test_every_state_that_can_be_spoken_to_has_a_maker() -> None:
    assert set(MAKERS) == set(State) - {State.CLOSED, State.HANDED_OVER}
    assert all(MAKERS[state]().state is state for state in MAKERS)


@pytest.mark.parametrize("state", MAKERS, ids=lambda state: state.name)
@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_a_pair_that_is_not_in_the_table_is_a_protocol_error(state: State, kind: type[m.Message]) -> None:
    session = MAKERS[state]()
    events = session.receive(wire(MESSAGES[kind]), 0.0)
    broken = [event for event in events if isinstance(event, s.Closed) and event.error]
    if (state, kind) in s.TRANSITIONS:
        assert not broken, broken
    else:
        assert broken and session.state is State.CLOSED
        assert session.receive(wire(HELLO), 0.0) == [], "nothing more comes out"


def test_the_table_names_every_message() -> None:
    assert {kind for _, kind in s.TRANSITIONS} == set(MESSAGES)


@pytest.mark.parametrize(
    "change",
    [
        {"instance": b"short"},
        {"heartbeat_ms": 0},
        {"heartbeat_ms": -5},
        {"link_timeout_ms": 2**31},
        {"cluster_id": -1},
    ],
    ids=str,
)
def test_an_impossible_identity_is_a_protocol_error(change: dict[str, object]) -> None:
    hello = msgspec.structs.replace(HELLO, identity=msgspec.structs.replace(A, **change))
    (event,) = acceptor().receive(wire(hello), 0.0)
    assert isinstance(event, s.Closed) and event.error


def test_a_data_connection_of_another_version_is_a_protocol_error() -> None:
    hello = m.DataHello(version=m.PROTOCOL_VERSION + 1, link_token=TOKEN, dialler_reads=True)
    (event,) = acceptor().receive(wire(hello), 0.0)
    assert isinstance(event, s.Closed) and event.error


@pytest.mark.parametrize("seed", [b"", b"1234567", b"x" * 65])
def test_a_seed_of_another_size_is_a_protocol_error(seed: bytes) -> None:
    (event,) = dialler().receive(wire(msgspec.structs.replace(WELCOME, seed=seed)), 0.0)
    assert isinstance(event, s.Closed) and event.error


@pytest.mark.parametrize("challenge", [b"", b"x" * 15, b"x" * 65])
def test_g16_a_challenge_of_another_size_is_a_protocol_error(challenge: bytes) -> None:
    for session, message in ((acceptor(), HELLO), (dialler(), WELCOME)):
        (event,) = session.receive(wire(msgspec.structs.replace(message, challenge=challenge)), 0.0)
        assert isinstance(event, s.Closed) and event.error


def test_large_frames_only_once_it_is_up() -> None:
    large = b"".join(
        bytes(c) for c in encode(m.Unlink(id=1, time_left_ms=1), [bytes(limits.HANDSHAKE_FRAME_NBYTES)])
    )
    (event,) = acceptor().receive(large, 0.0)
    assert isinstance(event, s.Closed) and event.error
    (event,) = up_acceptor().receive(large, 0.0)
    assert isinstance(event, s.MessageIn)


def test_a_ping_is_answered_and_answers_are_told_apart() -> None:
    session = up_dialler()
    events = session.receive(wire(m.Ping(id=4), m.Pong(id=5), m.Done(id=6, code=0), m.Heartbeat()), 0.0)
    assert [event.id for event in events if isinstance(event, s.AnswerIn)] == [5, 6] and len(events) == 3
    assert events[0] == s.PingIn(4)
    session.pong(4)
    assert said(session) == [m.Pong(id=4)]


def test_g18_signs_of_life_ask_for_nothing() -> None:
    session = up_dialler()
    before = session.heard
    session.receive(wire(m.Heartbeat(), m.Ping(id=1), m.Heartbeat()), 2.0)
    assert session.heard == before + 1 and session.frames_in >= 3


def test_bye_ends_it_with_the_peers_words() -> None:
    (event,) = up_dialler().receive(wire(m.Bye(text="enough")), 0.0)
    assert event == s.Closed("the peer dropped the link: enough")


@pytest.mark.parametrize("maker", [checking, awaiting_confirm, committing, dialler, preparing])
def test_a_handshake_can_be_refused(maker: Callable[[], Session]) -> None:
    session = maker()
    session.outgoing()
    session.refuse(5, "no", "why")
    assert said(session) == [m.Refused(code=5, text="no", kind="why")] and session.state is State.CLOSED


def test_decisions_out_of_turn_are_our_own_bugs() -> None:
    for decide in (
        lambda x: x.welcome(TOKEN, CHALLENGE, {}), lambda x: x.confirm((), {}), lambda x: x.establish(0.0, ()),
    ):  # fmt: skip
        with pytest.raises(RuntimeError):
            decide(acceptor())
    with pytest.raises(RuntimeError):
        up_dialler().refuse(1, "late")


# ---- time ------------------------------------------------------------------------------------------


@pytest.mark.rule("4.108", "S.5")
def test_an_unfinished_handshake_ends_after_ten_seconds() -> None:
    for state in set(MAKERS) - {State.UP}:
        session = MAKERS[state]()
        assert session.get_timer() == s.HANDSHAKE_TIMEOUT_S
        assert session.on_timer(9.99) == []
        (event,) = session.on_timer(10.0)
        assert isinstance(event, s.Closed) and not event.error and session.get_timer() is None


def test_a_dialler_has_its_own_patience() -> None:
    session = Session(A, 0.0, hello=HELLO, handshake_ends_at=60.0)
    assert session.get_timer() == 60.0


@pytest.mark.rule("3.61")
def test_heartbeats_go_out_every_interval() -> None:
    session = up_dialler()
    assert session.get_timer() == 1.0
    session.on_timer(0.99)
    assert said(session) == []
    session.on_timer(1.0)
    assert said(session) == [m.Heartbeat()]
    session.receive(wire(m.Heartbeat()), 1.5)
    assert session.get_timer() == 2.0


def test_silent_after_three_intervals_of_the_peer_and_heard_again() -> None:
    session = up_dialler()  # the peer's interval is 500 ms
    session.on_timer(1.0)
    assert session.get_timer() == 1.5
    assert session.on_timer(1.49) == []
    assert session.on_timer(1.5) == [s.LivenessIn(True)]
    assert session.on_timer(1.6) == []
    assert session.receive(wire(m.Heartbeat())[:1], 1.7) == [s.LivenessIn(False)], "any byte is life"


@pytest.mark.rule("4.87")
def test_dead_after_the_larger_of_both_timeouts() -> None:
    session = up_dialler()
    session.on_timer(5.1)
    assert session.state is State.UP
    (event,) = session.on_timer(9.0)
    assert isinstance(event, s.Closed) and "9.0 s" in event.reason


def test_life_on_another_connection_counts() -> None:
    session = up_dialler()
    session.on_timer(2.0)
    assert session.note_alive(3.0) == [s.LivenessIn(False)]
    assert session.on_timer(11.9) == [s.LivenessIn(True)]
    assert isinstance(session.on_timer(12.0)[0], s.Closed)


def test_the_time_we_were_held_up_is_given_back() -> None:
    session = up_dialler()
    session.forgive(100.0)
    assert session.on_timer(100.5) == []
    assert session.state is State.UP
