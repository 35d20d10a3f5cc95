"""What every pull owes while it reads, whichever way it goes: those who wait for it, or cut it off, find it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from llm_datadist import LLMException, LLMStatusCode, MemInfo, Memtype
from llm_datadist._engine.flights import Flight
from llm_datadist._engine.settling import settle
from llm_datadist.status import CacheNotExistError
from llm_datadist.transports.seam import Channel
from tests.support.engines import unlink
from tests.support.fake_nixl import World
from tests.support.fake_world import fake_world
from tests.support.warm import Warm

BACKENDS = ["local", "shm", "nixl", "tcp"]
GONE = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return fake_world(monkeypatch)


@pytest.fixture(params=BACKENDS)
def warm(request: pytest.FixtureRequest, world: World) -> Iterator[Warm]:
    with Warm(request.param) as warm:
        yield warm


@pytest.fixture
def far(world: World) -> Iterator[Warm]:
    """Over ``nixl``: where memory that goes under a read may end its owner."""
    with Warm("nixl") as warm:
        yield warm


def _in_plain(warm: Warm, event: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain pull, and ``event`` in the middle of its read."""
    channel: Channel = warm.peer.ways[0].channel
    read = channel.read

    class Observed:
        def __init__(self, plan: Any) -> None:
            self._completion = read(plan)

        def cancel(self, reason: str = "") -> None:
            self._completion.cancel(reason)

        def wait(self, *, deadline: float) -> Any:
            event()
            return self._completion.wait(deadline=deadline)

    with monkeypatch.context() as patch:
        patch.setattr(channel, "read", Observed)
        patch.setattr(warm.engine, "pull_again", lambda *_: False)
        warm.pull()


def _in_short(warm: Warm, event: Callable[[], object]) -> None:
    """The same for one that is repeated."""
    with warm.meanwhile(event):
        assert warm.again()


def _entered(warm: Warm) -> dict[str, Any]:
    (flight,) = warm.state.flights.where(lambda _: True)
    found = {name: getattr(flight, name) for name in Flight.__slots__ if name != "_cancel"}
    return {**found, "_under_way": flight._under_way is not None and not flight.is_over}


def test_g6_a_repeated_read_is_entered_as_a_plain_one(warm: Warm, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    _in_plain(warm, lambda: seen.append(_entered(warm)), monkeypatch)
    _in_short(warm, lambda: seen.append(_entered(warm)))
    plain, short = seen
    assert short == plain
    assert plain["reads"] == warm.source.cache_id
    assert plain["thread"] == threading.get_ident()


def test_g6_its_owner_finds_a_repeated_read(warm: Warm) -> None:
    """Asked to end what reads that cache, the reader does; asked for another cache it does not."""
    (there,) = warm.owner._engine._state.links.links()  # type: ignore[union-attr]
    left: list[list[Any]] = []

    def ask(cache_id: int) -> Callable[[], None]:
        return lambda: left.append(settle([there], time.monotonic() + 0.1, cache_id))

    with warm.meanwhile(ask(warm.source.cache_id + 1)):
        assert warm.again()
    with warm.meanwhile(ask(warm.source.cache_id), done=False), pytest.raises(CacheNotExistError):
        warm.again()
    assert left == [[], [there]]


@pytest.mark.parametrize("way", ["plain", "short"])
@pytest.mark.parametrize("how", ["unregister", "remap"])
def test_g6_memory_is_given_back_when_nothing_reads_it_any_more(
    far: Warm, world: World, how: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read that is under way in the network, and would go on for the rest of its time."""
    if way == "plain":
        monkeypatch.setattr(far.engine, "pull_again", lambda *_: False)
    held, go_on = _hold_reads(world, monkeypatch)
    regions = far.owner._engine._state.regions  # type: ignore[union-attr]
    forget, under_way = regions.forget, []

    def observed(tokens: Any) -> None:
        under_way.append(_under_way(world))
        forget(tokens)

    monkeypatch.setattr(regions, "forget", observed)
    with ThreadPoolExecutor(1) as pool:
        pulling = pool.submit(far.code)
        assert held.wait(10)
        _give_back(far, how)
        assert under_way == [False], "its memory is given back while it is read"
        go_on.set()
        assert pulling.result(10) == GONE


def _give_back(warm: Warm, how: str) -> None:
    manager, address = warm.owner.cache_manager, warm.source.tensor_addrs[0]
    if how == "unregister":
        manager.unregister_cache(warm.source.cache_id)
    else:
        manager.remap_registered_memory(MemInfo(Memtype.MEM_TYPE_DEVICE, address, 64))


@pytest.mark.parametrize("how", ["unregister", "unlink", "finalize"])
def test_g6_the_readers_own_side_ends_a_repeated_read(
    far: Warm, world: World, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    far.state.options = replace(far.state.options, sync_kv_timeout_ms=200)
    held, go_on = _hold_reads(world, monkeypatch)
    with ThreadPoolExecutor(1) as pool:
        pulling = pool.submit(_ended_with, far)
        assert held.wait(10)
        if how == "unregister":
            far.reader.cache_manager.unregister_cache(far.cache.cache_id)
        elif how == "unlink":
            unlink(far.reader, 1, force=True)
        else:  # which waits for last bytes, but not for long
            far.reader.finalize()
            pulling.exception(10)
        assert not _under_way(world)
        far.memory[:] = 0x77
        go_on.set()
        assert pulling.result(10) != LLMStatusCode.LLM_SUCCESS
        assert (far.memory == 0x77).all()


def _ended_with(warm: Warm) -> LLMStatusCode:
    started = time.monotonic() + 1000  # the call has all the time in the world
    try:
        warm.again(started=started)
    except LLMException as exc:
        return exc.status_code
    return LLMStatusCode.LLM_SUCCESS


def _hold_reads(world: World, monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Transfers of data stay under way; set when one is, and until the second is set."""
    held, go_on = threading.Event(), threading.Event()
    world.at_once = False

    def before_end() -> None:
        if any(_nbytes(agent) > 8 for agent in world.readers()) and not go_on.is_set():
            world.held.set()
            held.set()
        else:
            world.held.clear()

    world.before_end = before_end
    return held, go_on


def _nbytes(agent: Any) -> int:
    return max((size for t in list(agent._under_way) for _, _, size, _ in agent._transfers[t][1]), default=0)


def _under_way(world: World) -> bool:
    """Whether any living agent still has a transfer of data."""
    return any(_nbytes(agent) > 8 for agent in world.readers())
