"""Row G17: what a peer makes an engine keep is counted; what is beyond it is refused with a code, or asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from llm_datadist import BlocksCacheKey, LLMStatusCode
from llm_datadist._core import limits
from llm_datadist._core.budget import Budget
from llm_datadist._engine.flights import Flight
from llm_datadist._engine.state import State, peer_of
from llm_datadist._wire import messages as m
from tests.support.attacks import RawLink, frame
from tests.support.engines import Engines, unlink
from tests.support.pair import SUCCESS
from tests.support.world import wait_until

FULL = LLMStatusCode.LLM_OUT_OF_MEMORY

ENTRY = m.CacheEntry(
    cache_id=1, is_blocks=True, num_tensors=2, dim0=4, stride_nbytes=64, word=m.Word(), token=b"t" * 100
)


class Scene:
    """An engine in mode A, and a raw peer that hears its answers."""

    def __init__(self, engines: Engines) -> None:
        self.me = engines.make(1)
        self.cache, _ = engines.blocks(self.me, 7, model_id=0)
        assert self.me._engine is not None
        self.state: State = self.me._engine._state
        address = self.state.links.listen_address
        assert address is not None
        self.link = RawLink((address.host, address.port), 1, accessible=False, reads=False)
        self.link.send(frame(m.Publish(entry=ENTRY), b""))

    def ask(self, *messages: Any, lists: tuple[bytes, ...] = ()) -> Any:
        """The next answer but heartbeats."""
        data = [frame(x, *lists) if isinstance(x, m.Offer) else frame(x) for x in messages]
        self.link.send(b"".join(data))
        while isinstance(answer := self.link.hear(), m.Heartbeat):
            pass
        return answer


@pytest.fixture
def scene() -> Iterator[Scene]:
    with Engines("A", "tcp") as engines:
        scene = Scene(engines)
        yield scene
        scene.link.close()


def offer(number: int) -> m.Offer:
    return m.Offer(id=number, kind="layers", part_tensors=2, source_id=1)


def part(number: int) -> m.PartReady:
    return m.PartReady(id=50, offer_id=number, part=0, lease_id=1, lease=m.Word(), time_left_ms=1000)


LISTS = (bytes(800), bytes(800), bytes(16))


def test_g17_offers_beyond_what_a_link_may_hold_are_refused(scene: Scene) -> None:
    scene.state.offers = Budget(8000, 8000)
    assert scene.ask(offer(1), part(1), lists=LISTS).code == LLMStatusCode.LLM_PARAM_INVALID, "a bad one"
    answer = scene.ask(offer(2), part(2), lists=LISTS)
    assert answer.code == FULL and "try again" in answer.text
    refused: Any = peer_of(next(iter(scene.state.by_token.values()))).offers[2]
    assert (len(refused.src_blocks), refused.nbytes, refused.source.token) == (0, 0, b"")
    again = scene.ask(m.EndOffer(offer_id=1), m.EndOffer(offer_id=2), offer(3), part(3), lists=LISTS)
    assert again.code == LLMStatusCode.LLM_PARAM_INVALID, "there is room again"
    scene.link.close()
    assert wait_until(lambda: scene.state.offers.taken == 0)


def test_g17_more_open_offers_than_a_link_may_have_are_refused(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "OFFERS", 1)
    scene.ask(offer(1), part(1), lists=LISTS)
    answer = scene.ask(offer(2), part(2), lists=LISTS)
    assert answer.code == FULL and "1 pushes" in answer.text


def test_g17_parts_beyond_what_a_link_may_have_waiting_are_refused(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "PARTS", 0)
    assert scene.ask(offer(1), part(1), lists=LISTS).code == FULL


def test_g17_questions_that_wait_are_counted(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    settle = m.Settle(id=60, time_left_ms=60_000)
    assert scene.ask(settle).code == SUCCESS, "nothing is under way"
    link = next(iter(scene.state.by_token.values()))
    with scene.state.lock:
        flight = scene.state.flights.begin(Flight(link, (scene.cache.cache_id,)))
    monkeypatch.setattr(limits, "ASKED", 1)
    second = m.Settle(id=61, time_left_ms=60_000)
    answer = scene.ask(settle, second)
    assert (answer.id, answer.code) == (61, LLMStatusCode.LLM_LINK_BUSY)
    scene.state.flights.end(flight)
    answer = scene.link.hear()
    assert (answer.id, answer.code) == (60, SUCCESS)
    assert wait_until(lambda: link.context.asked == 0)


def test_g17_a_cache_that_our_copy_has_no_room_for_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with Engines("B", "tcp") as engines:
        owner, reader = engines.make(1), engines.make(2)
        assert owner._engine is not None and reader._engine is not None
        assert engines.link(reader, 1, owner) == SUCCESS
        engines.blocks(owner, 1, model_id=0)
        reader.check_link_status(1)
        state = reader._engine._state
        held = state.tables_nbytes
        assert held > 0
        monkeypatch.setattr(limits, "TABLE_NBYTES", held)
        engines.blocks(owner, 2, model_id=1)
        reader.check_link_status(1)
        assert state.tables_nbytes == held, "the second one is left out"
        into, memory = engines.blocks(reader)
        for model_id in (0, 1):
            reader.cache_manager.pull_blocks(BlocksCacheKey(1, model_id), into, [1], [2])
            assert (memory[:, 2] == 1 + model_id).all()
        assert unlink(reader, 1) == SUCCESS
        assert wait_until(lambda: state.tables_nbytes == 0)
