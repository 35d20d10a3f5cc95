"""Which routes are kept, how many, and until when."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from llm_datadist import BlocksCacheKey, Cache, CacheDesc, CacheKey, DataType, LLMStatusCode
from llm_datadist._core.layout import Layout
from llm_datadist._core.registry import GenerationWord, KeyName, Record
from llm_datadist._core.remote_table import Found, RemoteCache
from llm_datadist._engine import express
from llm_datadist._engine.routes import MAX_ROUTES, Route, Routes
from llm_datadist._engine.short_ways import ByAsking, short_way
from llm_datadist._engine.ways import Way
from llm_datadist.devices.writability import Writability
from llm_datadist.transports.local import LocalChannel
from llm_datadist.transports.seam import TransportCaps
from llm_datadist.transports.tcp_channel import TcpChannel
from tests.support.warm import KEY, Warm
from tests.support.world import wait_until

WORD = GenerationWord(8, 5)
DESC = CacheDesc(1, [4, 64], DataType.DT_UINT8)


def route(model_id: int = 0, cache_id: int = 1) -> Route:
    bases, layout = np.ones(1, np.uint64), Layout(1, 4, 64)
    record = Record(cache_id, DESC, layout, bases, True, True, WORD, ())
    cache = RemoteCache(3, layout, True, WORD, bases)
    return Route(
        KeyName("blocks", 0, model_id),
        cache,
        WORD,
        1,
        record,
        None,
        Writability().again(bases, 256, sealed=False),
    )


def test_a_route_is_found_by_model_and_cache() -> None:
    routes, kept = Routes(), [route(m, c) for m in range(2) for c in range(2)]
    for each in kept:
        routes.keep(each)
    assert [routes.find(m, c) for m in range(2) for c in range(2)] == kept
    assert routes.find(2, 0) is None
    newer = route(1, 1)
    routes.keep(newer)
    assert (routes.find(1, 1), len(routes)) == (newer, 4)


def test_those_into_one_cache_are_forgotten() -> None:
    routes = Routes()
    for model_id in range(3):
        for cache_id in range(3):
            routes.keep(route(model_id, cache_id))
    routes.forget(1)
    left = [(m, c) for m in range(3) for c in range(3) if routes.find(m, c)]
    assert left == [(m, c) for m in range(3) for c in (0, 2)]
    routes.clear()
    assert not len(routes)


def test_there_are_never_too_many() -> None:
    routes = Routes()
    for cache_id in range(MAX_ROUTES + 2):
        routes.keep(route(0, cache_id))
    assert len(routes) == MAX_ROUTES
    assert routes.find(0, 0) is routes.find(0, 1) is None
    assert routes.find(0, 2) and routes.find(0, MAX_ROUTES + 1)
    routes.keep(route(0, MAX_ROUTES))
    assert len(routes) == MAX_ROUTES and routes.find(0, 2), "a newer one of the same takes its own place"


def test_a_route_leads_to_what_it_found() -> None:
    known = route()
    assert known.leads_to(Found(known.cache, 0, GenerationWord(8, 5)))
    assert not known.leads_to(Found(known.cache, 0, GenerationWord(8, 6)))
    assert not known.leads_to(Found(route().cache, 0, WORD))


# ---- what pulls leave -------------------------------------------------------------------------------


@pytest.fixture
def warm() -> Iterator[Warm]:
    with Warm("local") as warm:
        yield warm


@pytest.fixture
def asked() -> Iterator[Warm]:
    """Not read by address."""
    with Warm("tcp") as warm:
        yield warm


def pulled(
    warm: Warm, key: Any = KEY, cache: Cache | None = None, src: Any = (1,), dst: Any = (2,), **more: Any
) -> int:
    """How many routes a pull leaves."""
    warm.peer.routes.clear()
    warm.reader.cache_manager.pull_blocks(key, cache or warm.cache, src, dst, **more)
    return len(warm.peer.routes)


def test_a_pull_of_one_block_leaves_a_route(warm: Warm) -> None:
    assert pulled(warm) == 1
    assert pulled(warm, src=np.array([1]), dst=np.array([2])) == 1, "whatever the list is"
    assert pulled(warm, notify=("name", b"")) == 1
    record = warm.state.registry.get(warm.cache.cache_id)
    assert warm.route.record is record
    assert warm.route.cache is warm.peer.table.find(KeyName("blocks", 0, 0))[0]  # type: ignore[index]
    assert warm.route.short is not None


def test_others_leave_none(warm: Warm) -> None:
    assert not pulled(warm, src=(1, 2), dst=(2, 3))
    assert not pulled(warm, src_layer_range=range(1), dst_layer_range=range(1))
    slots, _ = warm.blocks(warm.owner, 7, model_id=None)
    desc = CacheDesc(4, [4, 64], DataType.DT_UINT8)
    warm.owner.cache_manager.register_cache(desc, slots.tensor_addrs, [CacheKey(0, 9)])
    assert not pulled(warm, key=CacheKey(1, 9), src=(), dst=(2,))


def test_none_between_engines_of_one_process(warm: Warm) -> None:
    """There the two may overlap, which depends on the blocks."""
    warm.state.find_sibling = lambda instance: warm.owner._engine._state  # type: ignore[union-attr]
    assert not pulled(warm)


@pytest.mark.parametrize("backend", ["local", "tcp"])
def test_none_in_managed_mode(backend: str) -> None:
    with Warm(backend, "A") as warm:
        assert not len(warm.peer.routes)
        assert not warm.again()
        assert warm.code() == LLMStatusCode.LLM_SUCCESS


def test_that_a_channel_has_no_short_way_is_remembered(warm: Warm, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(LocalChannel, "rows", lambda *arguments: asked.append(arguments))
    warm.peer.routes.clear()
    for _ in range(3):
        warm.pull()
        assert warm.route.short is None
        assert not warm.again()
    assert len(asked) == 1


def test_not_every_channel_has_one(warm: Warm) -> None:
    known = warm.route
    found = Found(known.cache, 0, known.word)
    assert short_way(warm.peer, found, known.record) is not None
    channel: Any = object()
    plain = TransportCaps(one_sided=True, same_host_only=True)
    warm.peer.only_way = Way("plain", plain, channel, channel)
    assert short_way(warm.peer, found, known.record) is None


def test_an_owner_who_is_asked_must_be_able_to_say_it_shortly(
    asked: Warm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A unit has four bytes; and the channel must take part."""
    known = asked.route
    assert isinstance(known.short, ByAsking)
    for dim0, there in ((1 << 32, True), ((1 << 32) + 1, False)):
        layout = msgspec.structs.replace(known.cache.layout, dim0=dim0)
        found = Found(msgspec.structs.replace(known.cache, layout=layout), 0, known.word)
        assert (short_way(asked.peer, found, known.record) is not None) is there
    found = Found(known.cache, 0, known.word)
    monkeypatch.setattr(TcpChannel, "units", lambda *_: None)
    assert short_way(asked.peer, found, known.record) is None
    (way,) = asked.peer.ways
    asked.peer.ways = (replace(way, caps=TransportCaps(one_sided=False, same_host_only=False)),)
    monkeypatch.setattr(TcpChannel, "units", lambda *_: pytest.fail("asked"))
    assert short_way(asked.peer, found, known.record) is None


def test_a_cache_of_another_form_has_no_short_way(warm: Warm, asked: Warm) -> None:
    """A range of layers fits where the whole does not; so a route may lead there."""
    memory = warm.space(warm.reader, (2, 4, 64))
    narrow = warm.register(warm.reader, memory)
    assert not pulled(warm, cache=narrow, src_layer_range=range(1))
    warm.reader.cache_manager.pull_blocks(KEY, warm.cache, [1], [2])
    for layout in (Layout(2, 4, 64), Layout(4, 4, 32)):
        record = Record(9, DESC, layout, warm.route.record.addresses, True, True, WORD, ())
        for peer in (warm.peer, asked.peer):
            assert short_way(peer, Found(warm.route.cache, 0, WORD), record) is None


def test_a_cache_that_goes_meanwhile_leaves_none(warm: Warm, monkeypatch: pytest.MonkeyPatch) -> None:
    def and_unregister(*arguments: Any) -> Any:
        warm.reader.cache_manager.unregister_cache(warm.cache.cache_id)
        return short_way(*arguments)

    monkeypatch.setattr(express, "short_way", and_unregister)
    assert not pulled(warm)


def test_a_new_cache_of_the_peer_leaves_a_new_route(warm: Warm) -> None:
    old = warm.route
    warm.blocks(warm.owner, 1, model_id=0)
    assert warm.code() == LLMStatusCode.LLM_SUCCESS
    assert wait_until(
        lambda: warm.code() == LLMStatusCode.LLM_SUCCESS and warm.route.cache is not old.cache, 10
    )
    assert warm.again()


def test_a_model_of_its_own_has_a_route_of_its_own(warm: Warm) -> None:
    warm.blocks(warm.owner, 5, model_id=1)
    key = BlocksCacheKey(1, 1)
    assert wait_until(lambda: pulled(warm, key=key) == 1, 10)
    assert warm.again(key=key)
    assert (warm.memory[:, 2] == 5).all()
