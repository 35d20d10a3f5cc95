"""Row G17: what a peer makes an engine keep is counted; what is beyond it is refused with a code, or asked for."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from llm_datadist import BlocksCacheKey, LLMStatusCode
from llm_datadist._core import limits
from llm_datadist._core.budget import Budget
from llm_datadist._engine import push_threads
from llm_datadist._engine.asked import Asked
from llm_datadist._engine.flights import Flight
from llm_datadist._engine.received import ReceivedOffer
from llm_datadist._engine.receiver import Receiver
from llm_datadist._engine.state import State, peer_of
from llm_datadist._wire import messages as m
from llm_datadist.status import ParamInvalidError
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
        self.cache, self.memory = engines.blocks(self.me, 7, model_id=0)
        assert self.me._engine is not None
        self.state: State = self.me._engine._state
        self.asked: Asked = self.state.links._driver._handler._asked  # type: ignore[attr-defined]
        address = self.state.links.listen_address
        assert address is not None
        self.link = RawLink((address.host, address.port), 1, accessible=False, reads=False)
        self.link.send(frame(m.Publish(entry=ENTRY), b""))

    def ask(self, *messages: Any, lists: tuple[bytes, ...] = ()) -> Any:
        """The next answer."""
        data = [frame(x, *lists) if isinstance(x, m.Offer) else frame(x) for x in messages]
        self.link.send(b"".join(data))
        return self.link.hear()


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
    first, refused = map(peer_of(next(iter(scene.state.by_token.values()))).offers.get, (1, 2))
    assert isinstance(first, ReceivedOffer) and isinstance(refused, ReceivedOffer)
    assert wait_until(lambda: not first.running and not refused.running), (
        "an answer comes a moment before its end"
    )
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
    assert wait_until(lambda: scene.asked.count == 0)


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


def endless(scene: Scene, number: int) -> bytes:
    """A push whose source never comes, for nobody dials the connection on which it would; it waits for that."""
    bases = np.full(2, scene.memory[0].ctypes.data, "<u8").tobytes()
    block = np.zeros(1, "<u8").tobytes()
    one = m.Offer(id=number, kind="layers", part_tensors=2, source_id=1, unit_nbytes=64)
    ready = m.PartReady(id=number, offer_id=number, part=0, lease_id=1, lease=m.Word(), time_left_ms=60_000)
    return frame(one, block, block, bases) + frame(ready)


def test_g17_an_offer_that_was_ended_counts_until_its_work_has_let_go_of_it(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(limits.JOBS):
        scene.link.send(endless(scene, number))
    link = next(iter(scene.state.by_token.values()))
    assert wait_until(lambda: len(scene.state.flights.where(lambda f: f.uses(link))) == limits.JOBS)
    held = scene.state.offers.taken
    scene.state.offers = Budget(held + 30_000, held + 30_000)  # the next one fits, the one after it does not
    scene.state.offers.take(link.token, held)
    big = (bytes(8000), bytes(8000), bytes(16))
    answers = [scene.ask(offer(50), part(50), m.EndOffer(offer_id=50), lists=big)]
    while isinstance(answers[0], m.NeedConnections):
        answers = [scene.link.hear()]
    assert answers[0].code == LLMStatusCode.LLM_TIMEOUT and "withdrawn" in answers[0].text
    assert scene.state.offers.taken > held + 16_000, "the work that waits for its turn still has it"
    scene.link.send(frame(offer(51), *big) + frame(part(51)))
    refused: Any = None
    assert wait_until(lambda: 51 in peer_of(link).offers)
    refused = peer_of(link).offers[51]
    assert refused.nbytes == 0, "there is no room for it"
    scene.link.send(b"".join(frame(m.EndOffer(offer_id=number)) for number in (*range(limits.JOBS), 51)))
    assert wait_until(lambda: scene.state.offers.taken == 0)
    assert wait_until(lambda: peer_of(link).parts == 0)


@pytest.mark.rule("S.29")
@pytest.mark.parametrize("at", ["127.0.0.1", "127.0.0.2"], ids=["beside it", "elsewhere"])
def test_g18_threads_that_peers_keep_busy_are_bounded_for_all_links(
    at: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Twenty links with pushes that never end and questions that wait for them; another link's push has its turn."""
    monkeypatch.setattr(limits, "PUSH_THREADS", 16)
    monkeypatch.setattr(limits, "PUSH_TURN_S", 0.0)
    monkeypatch.setattr(push_threads, "_LOOK_S", 0.02)
    scene: Scene = request.getfixturevalue("scene")
    hostile = [
        RawLink(scene.link.address, 1, accessible=False, cluster_id=100 + number, at=at)
        for number in range(20)
    ]
    running = scene.state.push_threads._running
    for link in hostile:
        link.send(frame(m.Publish(entry=ENTRY), b""))
        link.send(b"".join(endless(scene, number) for number in range(limits.JOBS)))
        link.send(b"".join(frame(m.Settle(id=900 + n, time_left_ms=60_000)) for n in range(limits.JOBS)))
    assert wait_until(lambda: scene.state.push_threads.crowded and scene.asked.count > 0)
    names = [thread.name for thread in threading.enumerate()]
    assert len(running) <= 8, "one address leaves half to others"
    assert names.count("llm-datadist-worker") <= 16 + 1, "and all questions have one thread"
    answer = scene.ask(offer(1), part(1), lists=LISTS)
    assert answer.code == LLMStatusCode.LLM_PARAM_INVALID, "a bad one, which was looked at"
    for link in hostile:
        link.close()
    assert wait_until(lambda: not running and not scene.state.push_threads._waiting and not scene.asked.count)


def test_g18_a_push_of_many_parts_gives_way_between_two(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(limits, "PUSH_THREADS", 1)
    scene: Scene = request.getfixturevalue("scene")
    reading, go_on = threading.Event(), threading.Event()
    read: list[tuple[int, int]] = []

    def alone(receiver: Receiver, of: Any, message: m.PartReady, started: float) -> None:
        read.append((of.link.cluster_id, message.part))
        reading.set()
        assert go_on.wait(20)

    monkeypatch.setattr(Receiver, "_alone", alone)
    parts = (msgspec.structs.replace(part(1), part=number) for number in (0, 2, 4))
    scene.link.send(b"".join((frame(offer(1), *LISTS), *map(frame, parts))))
    assert reading.wait(20)
    other = RawLink(scene.link.address, 1, accessible=False, cluster_id=91)
    other.send(b"".join((frame(m.Publish(entry=ENTRY), b""), frame(offer(1), *LISTS), frame(part(1)))))
    assert wait_until(lambda: scene.state.push_threads.crowded)
    go_on.set()
    assert wait_until(lambda: len(read) == 4)
    assert read == [(90, 0), (91, 0), (90, 2), (90, 4)]
    other.close()


def test_g18_a_push_that_gives_way_says_so(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.link.send(endless(scene, 1))
    link = next(iter(scene.state.by_token.values()))
    assert wait_until(lambda: len(scene.state.flights.where(lambda f: f.uses(link))) == 1)
    (job,) = scene.state.push_threads._running
    job.cut()
    while isinstance(answer := scene.link.hear(), m.NeedConnections):
        pass
    assert (answer.id, answer.code) == (1, FULL) and "push it again" in answer.text
    assert wait_until(lambda: not scene.state.push_threads._running)


def test_g17_what_all_peers_have_published_is_counted(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    assert wait_until(lambda: scene.state.sources_nbytes > 0)
    held = scene.state.sources_nbytes
    monkeypatch.setattr(limits, "SOURCES_ENGINE_NBYTES", held + 2000)
    other = msgspec.structs.replace(ENTRY, cache_id=2)
    scene.link.send(frame(m.Publish(entry=other), b""))
    scene.link.send(frame(m.Withdraw(cache_ids=(2,))))
    assert wait_until(lambda: scene.state.sources_nbytes == held), "what is withdrawn counts no more"
    for number in range(2, 4):
        scene.link.send(frame(m.Publish(entry=msgspec.structs.replace(ENTRY, cache_id=number)), b""))
    assert scene.ask() is None, "it is dropped"
    assert wait_until(lambda: scene.state.sources_nbytes == 0)


@pytest.mark.parametrize(
    "wrong",
    [{"src_layers": (0, 1 << 63)}, {"dst_layers": (-1, 2)}, {"target": m.KeyRef(kind="x")}],
    ids=lambda wrong: next(iter(wrong)),
)
def test_g15_an_offer_that_breaks_the_protocol_is_its_peers_fault(
    scene: Scene, wrong: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    bad = msgspec.structs.replace(offer(1), **wrong)
    assert scene.ask(bad, part(1), lists=LISTS) is None
    assert wait_until(lambda: not scene.state.by_token), "which is told by then"
    records = [r for r in caplog.records if r.levelname != "INFO"]
    assert [(r.levelname, bool(r.exc_info)) for r in records] == [("WARNING", False)]
    assert "broke the protocol" in records[0].getMessage()


def test_g18_peers_that_wait_look_seldom_however_much_changes(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Together a number of times a second; one alone at once."""
    monkeypatch.setattr(limits, "LOOKS", 100)
    looks: list[int] = []
    link = next(iter(scene.state.by_token.values()))
    with scene.state.lock:
        flight = scene.state.flights.begin(Flight(link, (scene.cache.cache_id,)))
    where = scene.state.flights.where
    monkeypatch.setattr(scene.state.flights, "where", lambda chosen: looks.append(1) or where(chosen))
    for number in range(limits.JOBS):
        scene.link.send(frame(m.Settle(id=number, time_left_ms=60_000)))
    assert wait_until(lambda: scene.asked.count == limits.JOBS)
    looks.clear()
    began = time.monotonic()
    while time.monotonic() < began + 0.5:
        with scene.state.lock:
            scene.state.condition.notify_all()
        time.sleep(0.0005)
    assert len(looks) <= 100 * (time.monotonic() - began) + 2 * limits.JOBS
    scene.state.flights.end(flight)
    assert wait_until(lambda: scene.asked.count == 0)


def test_g17_one_call_has_one_end_that_is_made_ready(scene: Scene) -> None:
    endings = scene.me._engine._endings  # type: ignore[union-attr]
    link = next(iter(scene.state.by_token.values()))
    done = m.Done(id=1, code=SUCCESS)
    endings.park(link, 7, "x", b"y", done)
    with pytest.raises(ParamInvalidError, match="already"):
        endings.park(link, 7, "x", b"y", done)
    endings.decide((link, 7), ok=False)
    assert not endings._queue._held[link.cluster_id]


def test_g17_messages_that_do_not_come_to_their_end_are_counted(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of all links; one that has come far enough is dropped, the others stay."""
    monkeypatch.setattr(limits, "INBOX_SURE_NBYTES", 1 << 20)
    monkeypatch.setattr(limits, "INBOXES_NBYTES", 3 << 20)
    half = (frame(m.Publish(entry=ENTRY), bytes(8 << 20)))[: (2 << 20)]
    scene.link.send(half)
    first = next(iter(scene.state.by_token.values()))
    session = first._carrier.session  # type: ignore[attr-defined]
    assert wait_until(lambda: session.waiting_nbytes == len(half))
    other = RawLink(tuple(scene.link.address), 1, accessible=False, cluster_id=91)
    other.send(half)
    assert wait_until(lambda: other.ended)
    assert wait_until(lambda: list(scene.state.by_token.values()) == [first])
    other.close()
