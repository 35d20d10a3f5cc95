"""The protocol of one connection as a transition table. Pure: bytes in, events and bytes out.

Dialler: Hello -> Welcome -> (prepare) -> Confirm -> Established -> up. Acceptor: the mirror, where it prepares
after Confirm, or DataHello, after which the connection is no longer ours. Either side may end a handshake
with Refused. A pair (state,
message) that is not in ``TRANSITIONS`` is a protocol error, also a frame that does not decode.
An authentication step goes between Welcome and Confirm: one message pair, two states.
Invariants: time is an argument; after ``Closed`` nothing more comes out. Control thread only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

from llm_datadist._core import limits
from llm_datadist._wire import messages as m
from llm_datadist._wire.framing import Buffer, Decoder, Frame, ProtocolError, encode
from llm_datadist._wire.proofs import CHALLENGE_NBYTES

HANDSHAKE_TIMEOUT_S = limits.HANDSHAKE_S  # contract §4
MISSED_HEARTBEATS = 3  # one may be late, two are unlikely, three are silence
INSTANCE_NBYTES = 16
SEED_NBYTES = (8, limits.SECRET_NBYTES)  # of a link's secret: long enough not to be guessed, bounded


class State(Enum):
    """Where a connection stands."""

    AWAIT_FIRST = "awaiting the first frame"
    CHECKING = "checking the peer's Hello"  # we owe Welcome or Refused
    AWAIT_CONFIRM = "awaiting Confirm"
    COMMITTING = "deciding on Confirm"  # we owe Established or Refused
    AWAIT_WELCOME = "awaiting Welcome"
    PREPARING = "preparing after Welcome"  # we owe Confirm or Refused
    AWAIT_ESTABLISHED = "awaiting Established"
    UP = "up"
    HANDED_OVER = "a data connection"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class HelloIn:
    """Acceptor: owes ``welcome`` or ``refuse``."""

    hello: m.Hello


@dataclass(frozen=True, slots=True)
class DataIn:
    """Acceptor: this is a data connection; ``leftover`` are its first bytes."""

    hello: m.DataHello
    leftover: bytes


@dataclass(frozen=True, slots=True)
class WelcomeIn:
    """Dialler: owes ``confirm`` or ``refuse``."""

    welcome: m.Welcome


@dataclass(frozen=True, slots=True)
class ConfirmIn:
    """Acceptor: owes ``establish`` or ``refuse``."""

    confirm: m.Confirm


@dataclass(frozen=True, slots=True)
class EstablishedIn:
    """Dialler: the link is up."""

    established: m.Established


@dataclass(frozen=True, slots=True)
class RefusedIn:
    """The peer ended the handshake."""

    refused: m.Refused


@dataclass(frozen=True, slots=True)
class MessageIn:
    """Up: a message for the engine."""

    frame: Frame


@dataclass(frozen=True, slots=True)
class AnswerIn:
    """Up: an answer to the call with this id."""

    id: int
    frame: Frame


@dataclass(frozen=True, slots=True)
class PingIn:
    """Up: owes ``pong``."""

    id: int


@dataclass(frozen=True, slots=True)
class LivenessIn:
    """Up: the peer fell silent, or is heard again."""

    silent: bool


@dataclass(frozen=True, slots=True)
class Closed:
    """Over: close the connection. ``error``: the peer broke the protocol."""

    reason: str
    error: bool = False


Event: TypeAlias = (
    HelloIn | DataIn | WelcomeIn | ConfirmIn | EstablishedIn | RefusedIn
    | MessageIn | AnswerIn | PingIn | LivenessIn | Closed
)  # fmt: skip
Action: TypeAlias = Callable[["Session", Any, Frame], "Event | None"]
_OVER = frozenset({State.CLOSED, State.HANDED_OVER})  # no byte is looked at any more


class Session:
    """One connection, from its first byte to its last.

    Attributes:
        state: Where it stands.
        peer: Who the peer says it is; None before it has.
        last_alive: Instant of the last sign of life.
        bytes_in: Bytes received.
        peer_left: It has said goodbye.
        frames_in: Frames taken out of them.
        more: Bytes have come that were not looked at yet: call ``receive`` again, also with nothing new.
    """

    def __init__(
        self,
        mine: m.Identity,
        now: float,
        *,
        hello: m.Hello | None = None,
        handshake_ends_at: float | None = None,
    ) -> None:
        """``hello``: what a dialler says first, None if dialled. A dialler may have its own patience."""
        self._mine = mine
        self.peer: m.Identity | None = None
        self._decoder = Decoder()
        self._out: list[Buffer] = []
        ends_at = now + HANDSHAKE_TIMEOUT_S if handshake_ends_at is None else handshake_ends_at
        self._handshake_ends_at = ends_at
        self._next_heartbeat_at = 0.0
        self._silent = False
        self._silence_s = self._timeout_s = HANDSHAKE_TIMEOUT_S  # of the peer, once it is known
        self._now = now
        self.last_alive = now
        self.bytes_in = 0
        self.peer_left = False
        self.frames_in = 0
        self.heard = 0  # of these, that asked for something or answered; heartbeats do neither
        self.more = False
        self.state = State.AWAIT_FIRST
        if hello is not None:
            self.state = State.AWAIT_WELCOME
            self._out += encode(hello)

    # ---- in ----------------------------------------------------------------------------------------

    def receive(self, data: Buffer, now: float, most: int = sys.maxsize) -> list[Event]:
        """Takes received bytes, and ``most`` frames out of them. Closed comes last: the peer broke the protocol."""
        if self.state in _OVER:
            return []
        self.bytes_in += len(data)
        events = self.note_alive(now)
        self._decoder.push(data)
        stop = self.frames_in + most
        self.more = False
        try:
            while self.state not in _OVER and (frame := self._decoder.take()) is not None:
                self._now = now
                self.frames_in += 1
                self.heard += 1
                event = self._on_frame(frame)
                if event is not None:
                    events.append(event)
                if self.frames_in == stop:
                    self.more = self._decoder.has_bytes
                    break
        except ProtocolError as error:
            self.state = State.CLOSED
            events.append(Closed(str(error), error=True))
        return events

    @property
    def waiting_nbytes(self) -> int:
        """That have come, of frames that were not taken out yet."""
        return self._decoder.waiting_nbytes

    def _on_frame(self, frame: Frame) -> Event | None:
        action = TRANSITIONS.get((self.state, type(frame.message)))
        if action is None:
            raise ProtocolError(f"{type(frame.message).__name__} while {self.state.value}")
        return action(self, frame.message, frame)

    # ---- out ---------------------------------------------------------------------------------------

    def outgoing(self) -> list[Buffer]:
        """Chunks to be sent now, in order; forgets them."""
        out, self._out = self._out, []
        return out

    def welcome(self, seed: bytes, challenge: bytes, endpoints: dict[str, bytes]) -> None:
        """Acceptor: the peer is who it may be."""
        self._move(State.CHECKING, State.AWAIT_CONFIRM)
        self._out += encode(
            m.Welcome(identity=self._mine, seed=seed, challenge=challenge, endpoints=endpoints)
        )

    def confirm(self, reads_by: tuple[str, ...], endpoints: dict[str, bytes]) -> None:
        """Dialler: the peer is fine."""
        self._move(State.PREPARING, State.AWAIT_ESTABLISHED)
        self._out += encode(m.Confirm(reads_by=reads_by, endpoints=endpoints))

    def establish(self, now: float, reads_by: tuple[str, ...]) -> None:
        """Acceptor: the link is up."""
        self._move(State.COMMITTING, State.UP)
        self._out += encode(m.Established(reads_by=reads_by))
        self._now = now
        self._come_up()

    def refuse(self, code: int, text: str, kind: str = "") -> None:
        """Ends the handshake; send what is outgoing, then close."""
        if self.state in (State.UP, State.HANDED_OVER, State.CLOSED):
            raise RuntimeError(f"no handshake to refuse: the connection is {self.state.value}")
        self.state = State.CLOSED
        self._out += encode(m.Refused(code=code, text=text, kind=kind))

    def pong(self, number: int) -> None:
        """Answers a Ping."""
        self._out += encode(m.Pong(id=number))

    def bye(self, text: str) -> None:
        """Ends a link that is up; send what is outgoing, then close."""
        if self.state is State.UP:
            self._out += encode(m.Bye(text=text))
        self.state = State.CLOSED

    def _move(self, expected: State, state: State) -> None:
        if self.state is not expected:
            raise RuntimeError(f"the connection is {self.state.value}, not {expected.value}")
        self.state = state

    def _come_up(self) -> None:
        self.state = State.UP
        self._decoder.limit = limits.FRAME_NBYTES
        self.last_alive = self._now
        self._next_heartbeat_at = self._now + self._mine.heartbeat_ms / 1000

    # ---- time --------------------------------------------------------------------------------------

    def get_timer(self) -> float | None:
        """The instant at which :meth:`on_timer` wants to be called; None: never."""
        if self.state in _OVER:
            return None
        if self.state is not State.UP:
            return self._handshake_ends_at
        patience_s = self._timeout_s if self._silent else min(self._silence_s, self._timeout_s)
        return min(self._next_heartbeat_at, self.last_alive + patience_s)

    def on_timer(self, now: float) -> list[Event]:
        """What is due. Call only after every byte that had arrived by ``now`` was received."""
        if self.state in _OVER:
            return []
        if self.state is not State.UP:
            return self._judge_handshake(now)
        if now >= self._next_heartbeat_at:
            self._next_heartbeat_at = now + self._mine.heartbeat_ms / 1000
            self._out += encode(m.Heartbeat())
        if now >= self.last_alive + self._timeout_s:
            self.state = State.CLOSED
            return [Closed(f"heard nothing for {now - self.last_alive:.1f} s")]
        if now >= self.last_alive + self._silence_s and not self._silent:
            self._silent = True
            return [LivenessIn(True)]
        return []

    def forgive(self, seconds: float) -> None:
        """We were held up ourselves for so long: the peer is given that time to be heard."""
        self.last_alive += seconds

    def note_alive(self, now: float) -> list[Event]:
        """The peer has shown life on another connection."""
        self.last_alive = max(self.last_alive, now)
        if not self._silent:
            return []
        self._silent = False
        return [LivenessIn(False)]

    def _judge_handshake(self, now: float) -> list[Event]:
        if now < self._handshake_ends_at:
            return []
        text = f"the handshake took too long: still {self.state.value}"
        self.state = State.CLOSED
        return [Closed(text)]

    # ---- actions of the table ------------------------------------------------------------------------

    def _on_hello(self, hello: m.Hello, frame: Frame) -> Event:
        self._meet(hello.identity, hello.challenge)
        self.state = State.CHECKING
        return HelloIn(hello)

    def _on_data_hello(self, hello: m.DataHello, frame: Frame) -> Event:
        if hello.version != m.PROTOCOL_VERSION:
            raise ProtocolError(f"a data connection of protocol {hello.version}, not {m.PROTOCOL_VERSION}")
        self.state = State.HANDED_OVER
        return DataIn(hello, self._decoder.leftover())

    def _on_welcome(self, welcome: m.Welcome, frame: Frame) -> Event:
        if not SEED_NBYTES[0] <= len(welcome.seed) <= SEED_NBYTES[1]:
            raise ProtocolError(f"a seed of {len(welcome.seed)} bytes")
        self._meet(welcome.identity, welcome.challenge)
        self.state = State.PREPARING
        return WelcomeIn(welcome)

    def _on_confirm(self, confirm: m.Confirm, frame: Frame) -> Event:
        self.state = State.COMMITTING
        return ConfirmIn(confirm)

    def _on_established(self, established: m.Established, frame: Frame) -> Event:
        self._come_up()
        return EstablishedIn(established)

    def _on_refused(self, refused: m.Refused, frame: Frame) -> Event:
        self.state = State.CLOSED
        return RefusedIn(refused)

    def _on_heartbeat(self, heartbeat: m.Heartbeat, frame: Frame) -> None:
        self.heard -= 1  # the bytes themselves were the sign of life

    def _on_ping(self, ping: m.Ping, frame: Frame) -> Event:
        return PingIn(ping.id)

    def _on_answer(self, answer: m.Pong | m.Done | m.Grant | m.Found, frame: Frame) -> Event:
        return AnswerIn(answer.id, frame)

    def _on_bye(self, bye: m.Bye, frame: Frame) -> Event:
        self.state = State.CLOSED
        self.peer_left = True
        return Closed(f"the peer dropped the link: {bye.text[: limits.LINE_CHARS]}")

    def _on_message(self, message: m.Message, frame: Frame) -> Event:
        return MessageIn(frame)

    def _meet(self, identity: m.Identity, challenge: bytes) -> None:
        if not CHALLENGE_NBYTES[0] <= len(challenge) <= CHALLENGE_NBYTES[1]:
            raise ProtocolError(f"a challenge of {len(challenge)} bytes")
        if len(identity.instance) != INSTANCE_NBYTES or not 0 <= identity.cluster_id < 1 << 64:
            raise ProtocolError(f"cluster id {identity.cluster_id}, {len(identity.instance)} byte instance")
        for interval in (identity.heartbeat_ms, identity.link_timeout_ms):
            if not 0 < interval <= limits.TIME_MS:
                raise ProtocolError(f"a heartbeat or link timeout of {interval} ms")
        self.peer = identity
        self._silence_s = MISSED_HEARTBEATS * identity.heartbeat_ms / 1000
        self._timeout_s = max(self._mine.link_timeout_ms, identity.link_timeout_ms) / 1000


_FOR_THE_ENGINE = (
    m.Unlink, m.Settle, m.Resolve, m.Release, m.Lookup, m.Announce, m.Withdraw, m.Publish, m.Offer, m.PartReady,
    m.EndOffer, m.Finish, m.Decided, m.NeedConnections,
)  # fmt: skip

TRANSITIONS: dict[tuple[State, type[m.Message]], Action] = {
    (State.AWAIT_FIRST, m.Hello): Session._on_hello,
    (State.AWAIT_FIRST, m.DataHello): Session._on_data_hello,
    (State.AWAIT_WELCOME, m.Welcome): Session._on_welcome,
    (State.AWAIT_WELCOME, m.Refused): Session._on_refused,
    (State.AWAIT_CONFIRM, m.Confirm): Session._on_confirm,
    (State.AWAIT_CONFIRM, m.Refused): Session._on_refused,
    (State.AWAIT_ESTABLISHED, m.Established): Session._on_established,
    (State.AWAIT_ESTABLISHED, m.Refused): Session._on_refused,
    (State.UP, m.Heartbeat): Session._on_heartbeat,
    (State.UP, m.Ping): Session._on_ping,
    (State.UP, m.Pong): Session._on_answer,
    (State.UP, m.Done): Session._on_answer,
    (State.UP, m.Grant): Session._on_answer,
    (State.UP, m.Found): Session._on_answer,
    (State.UP, m.Bye): Session._on_bye,
    **{(State.UP, kind): Session._on_message for kind in _FOR_THE_ENGINE},
}
