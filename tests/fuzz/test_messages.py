"""Row G15: whatever a linked peer says, it is the peer's fault, told in one line, and nobody else notices."""

from __future__ import annotations

import contextlib
import logging
import random
import socket
import typing
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

import llm_datadist as dd
from llm_datadist._core import limits
from llm_datadist._engine.responder import Responder, Serving
from llm_datadist._link import peer_log
from llm_datadist._wire import messages as m
from llm_datadist.transports.seam import Fault
from tests.support.attacks import RawLink, frame
from tests.support.engines import Engines
from tests.support.links import Engine
from tests.support.pair import SUCCESS
from tests.support.raw_links import RawPeer, hello, identity

NUMBERS = [0, 1, 2, 7, -1, 255, 4096, 2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)]
WORDS = ["", "blocks", "cache", "layers", "req", "prefix", "x" * 300, "é", "x" * 9000]
OTHERS = [
    None,
    True,
    1.5,
    float("nan"),
    "x",
    b"\xff",
    [],
    [1],
    {},
    {"a": 1},
    [[[]]],
    msgspec.Raw(b"\xc1"),
    msgspec.Raw(b"\xa1\xff"),
]
KINDS = [kind for kind in typing.get_args(m.AnyMessage) if kind not in (m.Bye, m.Heartbeat)]
MODES = {"A": False, "B": True}


class Random:
    """Values for the fields of messages: mostly of the right type, at the ends of what they may be."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def message(self, kind: type[msgspec.Struct], wrong: float) -> dict[str, Any]:
        values = {"t": kind.__name__}
        for field in msgspec.structs.fields(kind):
            if field.required or self.rng.random() < 0.6:
                values[field.name] = self.value(field.type, wrong)
        return values

    def value(self, hint: Any, wrong: float) -> Any:
        rng = self.rng
        if rng.random() < wrong:
            return rng.choice(OTHERS)
        origin, args = typing.get_origin(hint), typing.get_args(hint)
        if origin is typing.Annotated:
            return self.value(args[0], wrong)
        if origin is tuple:
            kinds = args[:1] * rng.choice([0, 1, 2, 3, 70]) if args[-1] is Ellipsis else args
            return [self.value(kind, wrong) for kind in kinds]
        if origin is dict:
            return {rng.choice(WORDS[:4]): rng.randbytes(9) for _ in range(2)}
        if args:  # a union
            return self.value(rng.choice(args), wrong)
        return self.plain(hint, wrong)

    def plain(self, hint: Any, wrong: float) -> Any:
        rng = self.rng
        if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            values = self.message(hint, wrong)
            del values["t"]
            return values
        if hint is int:
            return rng.choice(NUMBERS) if rng.random() < 0.4 else rng.randrange(5)
        choices: dict[Any, Any] = {
            str: rng.choice(WORDS), bytes: rng.randbytes(rng.choice([0, 16, 64, 70_000])), bool: rng.random() < 0.5,
        }  # fmt: skip
        return choices.get(hint)

    def attachments(self) -> list[bytes]:
        sizes = [self.rng.choice([0, 8, 8, 16, 17, 800]) for _ in range(self.rng.choice([0, 1, 4, 4, 9]))]
        return [self.rng.randbytes(size) if self.rng.random() < 0.5 else bytes(size) for size in sizes]


@pytest.fixture(params=MODES)
def scene(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[Any]:
    """A way to link to an engine with a cache and a good link; both must be there at the end."""
    caplog.set_level(logging.INFO, logger="llm_datadist")
    mode = request.param
    with Engines(mode, "tcp") as engines:
        me, friend = engines.make(1), engines.make(2)
        assert engines.link(friend, 1, me) == SUCCESS
        engines.blocks(me, 7, model_id=0)
        into, _ = engines.blocks(friend)
        assert me._engine is not None
        address = me._engine._state.links.listen_address
        assert address is not None
        with contextlib.ExitStack() as links:

            def link() -> RawLink:
                made = RawLink((address.host, address.port), 1, accessible=MODES[mode], reads=False)
                links.callback(made.close)
                for number in range(1, 5):  # so that some offers have a source
                    made.send(frame(m.Publish(entry=_entry(number)), b""))
                return made

            yield link
        friend.check_link_status(1)
        friend.cache_manager.pull_blocks(dd.BlocksCacheKey(1, 0), into, [1], [2])


def survives(link: RawLink, data: bytes) -> bool:
    """Whether the engine still answers after this."""
    last = 2**40 + 1
    try:
        link.sock.sendall(data + frame(m.Lookup(id=last, key=m.KeyRef(kind="cache", id=99))))
        while (message := link.hear()) is not None:
            if isinstance(message, m.Done) and message.id == last:
                return True
    except OSError:
        return False
    return False


@pytest.mark.parametrize("seed", [15, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(20))])
def test_g15_each_kind_of_message_with_any_content(
    seed: int, scene: Any, caplog: pytest.LogCaptureFixture
) -> None:
    values = Random(seed)
    link, ports, broken = scene(), set(), 0
    for kind in KINDS * 20:
        data = frame(values.message(kind, values.rng.choice([0.0, 0.0, 0.1])), *values.attachments())
        if not survives(link, data):
            ports.add(link.sock.getsockname()[1])
            link.close()
            link, broken = scene(), broken + 1
    link.close()
    assert broken > 200, "or the messages were not broken"
    told = [r.getMessage() for r in caplog.records if "broke the protocol" in r.getMessage()]
    assert len(told) == broken and len(ports) == len({t.split("127.0.0.1:")[1].split(":")[0] for t in told})
    assert not [r for r in caplog.records if r.levelno > logging.WARNING or r.exc_info], "no fault of ours"
    assert max(len(r.getMessage()) for r in caplog.records) < 2000


def test_g15_a_broken_attachment_is_the_fault_of_the_peer(
    scene: Any, caplog: pytest.LogCaptureFixture
) -> None:
    link = scene()
    assert not survives(link, frame(m.Offer(id=1, kind="layers", part_tensors=1, source_id=1)))
    scene()  # by then the other one is over
    (told,) = [r for r in caplog.records if "broke the protocol" in r.getMessage()]
    assert told.levelno == logging.WARNING and not told.exc_info
    assert f"127.0.0.1:{link.sock.getsockname()[1]}" in told.getMessage()
    assert "internal" not in caplog.text
    link.close()


def _entry(cache_id: int) -> m.CacheEntry:
    return m.CacheEntry(
        cache_id=cache_id, is_blocks=True, num_tensors=2, dim0=4, stride_nbytes=64, word=m.Word()
    )


# ---- refused links ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "count", [200, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(300)])]
)
@pytest.mark.rule("S.26")
def test_g15_refused_links_are_counted(
    count: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, logger="llm_datadist.link")
    minutes: list[Any] = []
    with Engine(1) as engine:
        log = engine.service.log
        monkeypatch.setattr(log, "_call_at", lambda when, fn: minutes.append(fn))
        for _ in range(count):
            with RawPeer(engine.address) as peer:
                peer.say(hello(77, identity()))
                assert isinstance(peer.hear(), m.Refused)
        (told,) = [r for r in caplog.records if r.levelno == logging.WARNING]
        assert "refused the link" in told.getMessage() and "127.0.0.1:" in told.getMessage()
        caplog.clear()
        later = peer_log.time.monotonic() + limits.LINES_S
        monkeypatch.setattr(peer_log.time, "monotonic", lambda: later)
        minutes.pop()()
        (summed,) = caplog.records
        assert f"{count - 1} more refused links about 127.0.0.1" in summed.getMessage()
        assert not minutes, "nothing is left to be told"


def test_g15_a_flood_of_garbage_is_bounded_in_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "LINES", 20)
    with Engine(1) as engine:
        for _ in range(60):
            with socket.create_connection((engine.address.host, engine.address.port)) as sock:
                sock.sendall(b"\xff" * 64)
                sock.settimeout(5)
                with contextlib.suppress(ConnectionError):
                    assert sock.recv(1) == b""
        assert len([r for r in caplog.records if "broke the protocol" in r.getMessage()]) == 20


# ---- selectors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_g15_selectors_with_any_content(mode: str) -> None:
    """What a reader over tcp asks for is served or refused, whatever it is."""
    values, kinds = Random(7), set()
    with Engines(mode, "tcp") as engines:
        me, friend = engines.make(1), engines.make(2)
        assert engines.link(friend, 1, me) == SUCCESS
        engines.blocks(me, 7, model_id=0)
        assert me._engine is not None
        state = me._engine._state
        (token,) = state.by_token
        responder = Responder(state)
        for number in range(3000):
            head = values.message(m.ReadRequest, values.rng.choice([0.0, 0.0, 0.1]))
            del head["t"]
            if number % 2:
                word = state.registry.records()[0].word.value
                head |= {
                    "cache_id": 1,
                    "generation": word,
                    "lease_id": 0,
                    "tensor_count": 1,
                    "unit_nbytes": 64,
                }
                head |= {"first_tensor": 0, "row_nbytes": values.rng.choice(NUMBERS[:-1]), "index_nbytes": 4}
            try:
                raw = msgspec.msgpack.encode(head)
            except msgspec.MsgspecError:
                continue
            data = (
                len(raw).to_bytes(4, "little")
                + raw
                + values.rng.choice([b"", bytes(4), bytes(8), bytes(12), b"x"])
            )
            opened = responder.open(token, values.rng.choice([data, data[: values.rng.randrange(len(data))]]))
            responder.send_now(token, data, lambda extents: None)
            responder.units(token, data)
            kinds.add(type(opened))
            if isinstance(opened, Serving):
                opened.close()
    assert Fault in kinds and (mode == "A" or Serving in kinds)
