"""The short way of a repeated pull of one block: taken when everything is as it was, and never otherwise."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import pytest

from llm_datadist import BlocksCacheKey, Cache, CacheKey, LLMStatusCode
from llm_datadist._engine.flights import Flight
from llm_datadist._engine.short_ways import ByAddress
from llm_datadist.keys import CacheKeyByIdAndIndex
from llm_datadist.status import CacheNotExistError
from llm_datadist.transports.seam import Fault, FaultKind
from tests.support.engines import unlink
from tests.support.memory import FILL
from tests.support.pair import SUCCESS
from tests.support.warm import KEY, Warm
from tests.support.world import wait_until

GONE = CacheNotExistError("gone")
BLOCK_NBYTES = 4 * 64


@pytest.fixture(params=["local", "shm", "tcp"])
def warm(request: pytest.FixtureRequest) -> Iterator[Warm]:
    with Warm(request.param) as warm:
        yield warm


@pytest.fixture(params=["local", "shm"])
def near(request: pytest.FixtureRequest) -> Iterator[Warm]:
    """Read by address."""
    with Warm(request.param) as warm:
        yield warm


# ---- taken ------------------------------------------------------------------------------------------


def test_a_repeated_pull_takes_the_short_way(warm: Warm) -> None:
    began = warm.reader.links()[0].bytes_in
    for _ in range(3):
        assert warm.again()
        assert warm.arrived()
    assert warm.reader.links()[0].bytes_in == began + 3 * BLOCK_NBYTES


def test_any_block_does(warm: Warm) -> None:
    assert warm.again((3,), (0,))
    assert (warm.memory[:, 0] == 1).all() and (warm.memory[:, 1:] == FILL).all()


def test_the_public_call_takes_it(warm: Warm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm.engine, "pull", lambda *_: pytest.fail("the plain way"))
    warm.memory[:] = FILL
    warm.pull()
    assert warm.arrived()


@pytest.mark.parametrize(
    "more",
    [
        {"src_layer_range": range(1), "dst_layer_range": range(1, 2)},
        {"src_layer_range": range(2)},
        {"dst_layer_range": range(2)},
        {"tensor_num_per_layer": 1},
        {"notify": ("name", b"")},
    ],
    ids=lambda more: "+".join(more),
)
def test_calls_with_options_do_not(warm: Warm, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]) -> None:
    monkeypatch.setattr(warm.engine, "pull_again", lambda *_: pytest.fail("the short way"))
    warm.pull(**more)


@pytest.mark.parametrize("per_layer", [2.0, True, None, "2", np.array([2, 2])], ids=str)
def test_what_only_equals_the_default_is_refused_as_ever(warm: Warm, per_layer: Any) -> None:
    with pytest.raises(TypeError, match="tensor_num_per_layer"):
        warm.pull(tensor_num_per_layer=per_layer)


class _Key(BlocksCacheKey):
    pass


@pytest.mark.parametrize(
    "blocks",
    [(), (4,), (-1,), (1 << 64,), (1, 2), (True,), (1.0,), (np.int64(1),), (None,), np.array([1]), "1", None],
    ids=repr,
)
def test_other_block_lists_are_for_the_plain_way(warm: Warm, blocks: Any) -> None:
    assert not warm.again(src=blocks)
    assert not warm.again(dst=blocks)
    assert not warm.again((blocks,), (2,))
    assert warm.untouched()


def test_a_tuple_is_for_the_plain_way(warm: Warm) -> None:
    assert not warm.engine.pull_again(KEY, warm.cache, (1,), [2], time.monotonic())
    assert not warm.engine.pull_again(KEY, warm.cache, [1], (2,), time.monotonic())


@pytest.mark.parametrize(
    "key",
    [BlocksCacheKey(1, 5), BlocksCacheKey(7, 0), _Key(1, 0), CacheKey(1, 0), CacheKeyByIdAndIndex(1, 1), 1],
    ids=repr,
)
def test_other_keys_are_for_the_plain_way(warm: Warm, key: Any) -> None:
    assert not warm.again(key=key)
    assert warm.untouched()


# ---- not taken any more -----------------------------------------------------------------------------


def test_not_while_draining(warm: Warm) -> None:
    warm.state.draining = True
    assert not warm.again()
    assert warm.untouched()
    assert warm.code() == LLMStatusCode.LLM_LINK_BUSY


def test_not_when_finalized(warm: Warm) -> None:
    warm.state.closed = GONE
    assert not warm.again()
    warm.state.closed = None
    assert warm.untouched()


def test_not_while_the_link_is_unlinked(warm: Warm) -> None:
    warm.peer.closing = True
    assert not warm.again()
    assert warm.untouched()
    assert warm.code() == LLMStatusCode.LLM_NOT_YET_LINK


def test_not_over_a_link_that_is_going_down(warm: Warm) -> None:
    link = warm.state.links.get(1)
    assert link is not None
    assert warm.state.by_token.pop(link.token) is link
    assert not warm.again()
    assert warm.untouched()
    warm.state.by_token[link.token] = link


def test_not_over_a_link_that_is_gone(warm: Warm) -> None:
    peer = warm.peer
    assert unlink(warm.reader, 1) == SUCCESS
    assert not warm.again()
    assert not len(peer.routes)
    assert warm.code() == LLMStatusCode.LLM_NOT_YET_LINK
    assert warm.link(warm.reader, 1, warm.owner) == SUCCESS
    assert not warm.again()
    assert warm.untouched()


def test_not_into_a_cache_that_is_unregistered(warm: Warm) -> None:
    route = warm.route
    warm.reader.cache_manager.unregister_cache(warm.cache.cache_id)
    assert not len(warm.peer.routes)
    warm.put_back(route)
    assert not warm.again()
    assert warm.untouched()
    assert warm.code() == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST


def test_not_into_a_cache_that_was_mapped_anew(warm: Warm) -> None:
    route = warm.route
    record = warm.state.registry.get(warm.cache.cache_id)
    with warm.state.lock:
        warm.engine._catalog._renew(record)
    assert not len(warm.peer.routes)
    warm.put_back(route)
    assert not warm.again()
    assert warm.untouched()
    assert warm.code() == SUCCESS
    assert warm.again()


def test_not_by_a_handle_of_another_life(warm: Warm) -> None:
    cache = warm.cache
    old = Cache(cache.cache_id, cache.cache_desc, cache.tensor_addrs, True, life=object())
    assert not warm.again(cache=old)
    assert not warm.again(cache="cache")
    assert warm.untouched()


def test_not_from_a_cache_that_its_owner_has_withdrawn_but_not_cleared(warm: Warm) -> None:
    """As one that drains does: its words stay."""
    version = warm.peer.table.version
    warm.owner.drain(5000)
    assert wait_until(lambda: warm.peer.table.version != version, 10)
    assert not warm.again()
    assert warm.untouched()
    assert warm.code() == LLMStatusCode.LLM_LINK_BUSY


def test_not_by_a_key_that_its_owner_has_taken_away_untold(warm: Warm) -> None:
    """The cache stays where it is; only the word of the key says it."""
    state = warm.owner._engine._state  # type: ignore[union-attr]
    with state.lock:
        assert state.registry.unbind(warm.route.name) is not None
    assert not warm.again()
    assert warm.untouched()
    assert warm.code() == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST


def test_not_from_a_cache_that_was_announced_anew(warm: Warm) -> None:
    peer, route = warm.peer, warm.route
    with warm.state.lock:
        peer.table.put(msgspec.structs.replace(route.cache))
    assert not warm.again()
    assert warm.untouched()


def test_other_news_of_the_peer_do_not_matter(warm: Warm) -> None:
    version = warm.peer.table.version
    warm.blocks(warm.owner, 3, model_id=9)
    assert wait_until(lambda: warm.peer.table.version != version, 10)
    assert warm.route.version == version
    assert warm.again()
    assert warm.arrived()
    assert warm.route.version == warm.peer.table.version, "it is looked up once"


def test_a_word_that_has_changed_before_lets_nothing_be_read(near: Warm) -> None:
    near.owner._engine._state.clear_word(near.route.word)  # type: ignore[union-attr]
    with near.meanwhile(lambda: pytest.fail("a read")):
        assert not near.again()
    assert near.untouched()


def test_a_word_that_cannot_be_read_lets_nothing_be_read(near: Warm, monkeypatch: pytest.MonkeyPatch) -> None:
    short = near.route.short
    assert isinstance(short, ByAddress)
    monkeypatch.setattr(near.peer, "words", None)
    monkeypatch.setattr(short.channel, "read_word", lambda *_, **__: Fault(FaultKind.PEER_LOST, "gone"))
    assert not near.again()
    assert near.untouched()


def test_without_a_mapping_words_are_read_by_the_channel(near: Warm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(near.peer, "words", None)
    assert near.again()
    assert near.arrived()


def test_a_word_that_changes_meanwhile_is_noticed(near: Warm) -> None:
    clear = lambda: near.owner._engine._state.clear_word(near.route.word)  # type: ignore[union-attr]  # noqa: E731
    began = near.peer.bytes_in
    with near.meanwhile(clear):
        assert not near.again()
    assert near.peer.bytes_in == began


def test_a_read_that_fails_is_for_the_plain_way(warm: Warm) -> None:
    with warm.meanwhile(lambda: None, done=False):
        assert not warm.again()
        assert warm.code() == SUCCESS
    assert warm.again()


def test_not_after_its_time(warm: Warm) -> None:
    assert not warm.again(started=time.monotonic() - warm.state.timeout_s)
    assert warm.untouched()


def test_the_plain_way_counts_its_time_from_the_call(warm: Warm, monkeypatch: pytest.MonkeyPatch) -> None:
    before = time.monotonic()
    seen: list[float] = []
    monkeypatch.setattr(warm.engine, "pull_again", lambda *arguments: bool(seen.append(arguments[-1])))
    monkeypatch.setattr(warm.engine._initiator, "pull", lambda request, started: seen.append(started))
    warm.pull()
    assert seen[0] == seen[1] >= before


# ---- while it goes ----------------------------------------------------------------------------------


def test_a_pull_is_in_flight_until_its_end(warm: Warm) -> None:
    seen: list[Flight] = []
    with warm.meanwhile(lambda: seen.extend(warm.state.flights.where(lambda _: True))):
        assert warm.again()
    (flight,) = seen
    assert flight.link is warm.state.links.get(1)
    assert (flight.cache_ids, flight.thread) == ((warm.cache.cache_id,), threading.get_ident())
    assert not flight.serving


def test_a_cut_pull_ends_with_the_reason(warm: Warm) -> None:
    cut = warm.meanwhile(lambda: warm.state.flights.cut(lambda _: True, GONE), done=False)
    with cut, pytest.raises(CacheNotExistError, match="gone"):
        warm.again()
    assert not warm.state.flights.where(lambda _: True)


def test_a_cut_before_the_first_byte_lets_nothing_be_read(
    near: Warm, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(*_: object) -> bool:
        near.state.flights.cut(lambda _: True, GONE)
        return True

    monkeypatch.setattr(ByAddress, "_is_intact", cut)
    with near.meanwhile(lambda: pytest.fail("a read")), pytest.raises(CacheNotExistError, match="gone"):
        near.again()
    assert near.untouched()


def test_a_cut_ends_the_waiting_for_an_owner_that_does_not_answer() -> None:
    with Warm("tcp") as warm, ThreadPoolExecutor(1) as pool:
        owner, flights = warm.owner._engine._state, warm.state.flights  # type: ignore[union-attr]
        with owner.lock:
            pulling = pool.submit(warm.again, started=time.monotonic() + 1000)
            assert wait_until(lambda: any(f._cancel for f in flights.where(lambda _: True)), 10)
            flights.cut(lambda _: True, GONE)
            error = pulling.exception(10)
        assert isinstance(error, CacheNotExistError)


def test_a_cut_that_comes_too_late_is_none(warm: Warm) -> None:
    with warm.meanwhile(lambda: warm.state.flights.cut(lambda _: True, GONE)):
        assert warm.again()
    assert warm.arrived()


def test_an_interrupt_leaves_nothing_in_flight(warm: Warm) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with warm.meanwhile(interrupt), pytest.raises(KeyboardInterrupt):
        warm.again()
    assert not warm.state.flights.where(lambda _: True)


def test_nor_one_at_the_very_end(warm: Warm, monkeypatch: pytest.MonkeyPatch) -> None:
    end, calls = warm.state.flights.end, []

    def interrupted(flight: Flight) -> None:
        calls.append(flight)
        if len(calls) == 1:
            raise KeyboardInterrupt
        end(flight)

    monkeypatch.setattr(warm.state.flights, "end", interrupted)
    with pytest.raises(KeyboardInterrupt):
        warm.again()
    assert not warm.state.flights.where(lambda _: True)
