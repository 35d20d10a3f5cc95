"""What the engine shows a transport that serves a read: checked, and not to be withdrawn meanwhile."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest

from llm_datadist import BlocksCacheKey, LLMStatusCode
from llm_datadist._core.layout import CacheSlice
from llm_datadist._core.registry import GenerationWord
from llm_datadist._core.segments import Extents
from llm_datadist._engine import codec
from llm_datadist._waiting import is_within
from llm_datadist.transports.seam import Fault
from llm_datadist.transports.tcp_serving import ServedConnection
from tests.support.engines import Engines
from tests.support.memory import FILL

OWNER, READER = 1, 2


@dataclass
class Scene:
    """Two linked engines of mode B over tcp; ``cache_id`` is the owner's."""

    owner: Any
    reader: Any
    cache_id: int
    into: Any
    memory: Any

    @property
    def responder(self) -> Any:
        return self.owner._engine._responder

    @property
    def state(self) -> Any:
        return self.responder._state

    def selector(self, block: int, *, wrong_by: int = 0) -> bytes:
        word = self.state.registry.get(self.cache_id).word
        part = CacheSlice(0, 1, np.array([block], np.uint64), 64, 64)
        return codec.selector(part, self.cache_id, GenerationWord(word.address, word.value + wrong_by), None)

    def ask(self, how: str, token: bytes, selector: bytes) -> tuple[Any, list[Extents]]:
        """What ``open`` or ``send_now`` answered, and what could be sent."""
        shown: list[Extents] = []
        if how == "send_now":
            return self.responder.send_now(token, selector, shown.append), shown
        answer = self.responder.open(token, selector)
        if not isinstance(answer, Fault):
            shown.append(answer.extents)
            answer.close()
        return answer, shown

    @property
    def token(self) -> bytes:
        (token,) = self.state.by_token
        return bytes(token)


@pytest.fixture
def scene() -> Iterator[Scene]:
    with Engines("B", "tcp") as engines:
        owner, reader = engines.make(OWNER), engines.make(READER)
        cache, _ = engines.blocks(owner, 7, model_id=5)
        assert engines.link(reader, OWNER, owner) is LLMStatusCode.LLM_SUCCESS
        yield Scene(owner, reader, cache.cache_id, *engines.blocks(reader))


@pytest.mark.parametrize("how", ["open", "send_now"])
def test_what_is_asked_for_is_shown(scene: Scene, how: str) -> None:
    _, (extents,) = scene.ask(how, scene.token, scene.selector(3))
    assert extents.nbytes == 64
    assert not scene.state.flights.where(lambda flight: True)


@pytest.mark.parametrize("how", ["open", "send_now"])
def test_nothing_is_shown_that_is_not_allowed(scene: Scene, how: str) -> None:
    good = scene.selector(0)
    cases = [
        (b"?" * 16, good, LLMStatusCode.LLM_LINK_FAILED),  # no such link
        (scene.token, scene.selector(0, wrong_by=2), LLMStatusCode.LLM_KV_CACHE_NOT_EXIST),
        (scene.token, scene.selector(4), LLMStatusCode.LLM_PARAM_INVALID),  # it has four blocks
        (scene.token, good[:5], LLMStatusCode.LLM_PARAM_INVALID),
    ]
    for token, selector, code in cases:
        answer, shown = scene.ask(how, token, selector)
        assert isinstance(answer, Fault) and answer.code == code
        assert not shown
    assert not scene.state.flights.where(lambda flight: True)


def test_a_small_answer_is_sent_under_the_lock(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no key and no lease can end between the check and the last byte."""
    free: list[bool] = []
    send = ServedConnection._send_whole

    def look(connection: ServedConnection, extents: Extents) -> None:
        free.append(not is_within())
        send(connection, extents)

    monkeypatch.setattr(ServedConnection, "_send_whole", look)
    scene.reader.cache_manager.pull_blocks(BlocksCacheKey(OWNER, 5), scene.into, [0], [1])
    assert free == [False]
    assert (scene.memory[:, 1] == 7).all() and (scene.memory[:, 0] == FILL).all()


# ---- units ------------------------------------------------------------------------------------------


def units_of(scene: Scene) -> Any:
    units = scene.responder.units(scene.token, scene.selector(2))
    assert units is not None
    return units


def test_any_unit_is_shown_as_if_it_had_been_asked_for(scene: Scene) -> None:
    units = units_of(scene)
    for block in range(4):
        shown: list[Extents] = []
        assert units.send_now(block, shown.append)
        assert shown == scene.ask("send_now", scene.token, scene.selector(block))[1]
    assert not units.send_now(4, pytest.fail)
    assert not units.send_now((1 << 32) - 1, pytest.fail)


def test_units_are_shown_under_the_lock(scene: Scene) -> None:
    assert units_of(scene).send_now(0, lambda _: None if is_within() else pytest.fail("free"))
    assert not is_within()


def test_units_that_are_not_what_they_were_are_not_shown(scene: Scene) -> None:
    state, units = scene.state, units_of(scene)
    link = state.by_token.pop(scene.token)
    assert not units.send_now(0, pytest.fail)
    state.by_token[link.token] = link
    state.closed = ValueError("closed")
    assert not units.send_now(0, pytest.fail)
    state.closed = None
    assert units.send_now(0, lambda _: None)
    record = state.registry.get(scene.cache_id)
    with state.lock:
        scene.owner._engine._catalog._renew(record)
    assert not units.send_now(0, pytest.fail)
    units = units_of(scene)
    assert units.send_now(0, lambda _: None)
    scene.owner.cache_manager.unregister_cache(scene.cache_id)
    assert not units.send_now(0, pytest.fail)


def test_not_every_selector_has_units(scene: Scene) -> None:
    part, word = (
        CacheSlice(0, 1, np.array([1], np.uint64), 64, 64),
        scene.state.registry.get(scene.cache_id).word,
    )
    two = msgspec.structs.replace(part, indices=np.array([1, 2], np.uint64), row_nbytes=128)
    cut = msgspec.structs.replace(part, row_nbytes=63)
    for other in (two, cut):
        selector = codec.selector(other, scene.cache_id, word, None)
        assert isinstance(scene.ask("send_now", scene.token, selector)[0], type(None))
        assert scene.responder.units(scene.token, selector) is None
    leased = codec.selector(part, scene.cache_id, word, (1, word))
    wide = codec.selector(
        msgspec.structs.replace(part, indices=np.array([1 << 32], np.uint64)), 1, word, None
    )
    stale, foreign = scene.selector(0, wrong_by=2), scene.selector(4)
    for selector in (leased, wide, stale, foreign, b"", b"1234"):
        assert scene.responder.units(scene.token, selector) is None
    assert scene.responder.units(b"?" * 16, scene.selector(0)) is None
    known = scene.selector(3)
    assert scene.responder.units(scene.token, known) is not None
    eight = eight_bytes(known)
    assert scene.ask("send_now", scene.token, eight)[1] == scene.ask("send_now", scene.token, known)[1]
    assert scene.responder.units(scene.token, eight) is None, "its last four bytes are half a number"
    two = msgspec.structs.replace(part, indices=np.array([1, 2], np.uint64))
    assert not codec.is_unit(codec.read_selector(known)[0], two)


def eight_bytes(selector: bytes) -> bytes:
    """The same with an index of eight bytes, which ours is only where it must be."""
    request, part = codec.read_selector(selector)
    head = msgspec.msgpack.encode(msgspec.structs.replace(request, index_nbytes=8))
    return len(head).to_bytes(4, "little") + head + part.indices.tobytes()


def test_a_lease_is_looked_at_every_time() -> None:
    """It may end; so what a peer reads by one has no units."""
    with Engines("A", "tcp") as engines:
        owner, reader = engines.make(OWNER), engines.make(READER)
        cache, _ = engines.blocks(owner, 7, model_id=5)
        assert engines.link(reader, OWNER, owner) is LLMStatusCode.LLM_SUCCESS
        responder: Any = owner._engine._responder  # type: ignore[union-attr]
        state = responder._state
        (token,), record = state.by_token, state.registry.get(cache.cache_id)
        with state.lock:
            lease = state.leases.grant(token, record, math.inf, None)
        part = CacheSlice(0, 1, np.array([1], np.uint64), 64, 64)
        selector = codec.selector(part, cache.cache_id, record.word, (lease.lease_id, lease.word))
        assert responder.send_now(token, selector, lambda _: None) is None
        assert responder.units(token, selector) is None


def test_units_go_with_the_key_that_they_were_asked_for_by(scene: Scene) -> None:
    """The cache stays; a peer whose copy of the table is behind must not be shown it by a key that it lost."""
    registry = scene.state.registry
    record = registry.get(scene.cache_id)
    ((name, _, word),) = registry.bindings_of(record)
    part = CacheSlice(0, 1, np.array([1], np.uint64), 64, 64)
    units = scene.responder.units(scene.token, codec.selector(part, scene.cache_id, word, None))
    assert units.send_now(0, lambda _: None)
    with scene.state.lock:
        assert registry.unbind(name) is record
    assert not units.send_now(0, pytest.fail)
    assert units_of(scene).send_now(0, lambda _: None), "by the word of the cache"
