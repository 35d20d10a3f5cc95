"""Transport ``nixl`` with agents that are not NIXL's: what it makes of their rules and failures."""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
import mmap
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from llm_datadist._core import limits
from llm_datadist._core.segments import Segments
from llm_datadist.testing.board import extents
from llm_datadist.transports import _nixl
from llm_datadist.transports.nixl import NixlTransport
from llm_datadist.transports.nixl_told import ID_NBYTES, Token
from llm_datadist.transports.seam import (
    FaultKind,
    Progress,
    RegistrationRefused,
    TransportUnavailable,
)
from tests.support.fake_nixl import buffer
from tests.support.memory import PAGE, Mapping
from tests.support.nixl_rig import SIZE, Rig, kind_of, region

LIBC = ctypes.CDLL(None)


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.close()


# ---- memory -------------------------------------------------------------------------------------


def test_reads_what_was_told_and_nothing_else(rig: Rig) -> None:
    assert not rig.channel.covers(rig.plan().source)
    assert kind_of(rig.read()) is FaultKind.SOURCE
    rig.tell(rig.source, nbytes=2 * SIZE)
    assert rig.channel.covers(rig.plan(SIZE).source)
    assert not rig.channel.covers(rig.plan(SIZE + 1).source)
    rig.check(7)
    elsewhere, address = buffer(SIZE)
    there, _ = rig.plan().source, rig.plan().destination
    progress = rig.channel.read(Segments(there, extents([address], [(0, SIZE)]))).wait(
        deadline=time.monotonic() + 9
    )
    assert kind_of(progress) is FaultKind.DESTINATION
    assert not elsewhere.any()


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_ranges_that_overlap_are_all_readable(rig: Rig, order: tuple[int, ...]) -> None:
    """A pool, a cache within it, and one that begins in its middle: in every order, here and there."""
    ranges = [(0, 3 * SIZE), (SIZE, SIZE // 2), (2 * SIZE, 2 * SIZE)]
    rig.reader.unregister(rig.own)
    for i in order:
        at, nbytes = ranges[i]
        rig.tell(rig.source + at, nbytes=nbytes)
        rig.reader.register(region(rig.destination, nbytes=nbytes))
        rig.check(at, nbytes)
    for at, nbytes in (*ranges, (10, 2 * SIZE), (3 * SIZE, SIZE), (0, 3 * SIZE)):
        rig.check(at, nbytes)
    assert not rig.world.losses


def test_a_plan_may_need_several_tokens(rig: Rig) -> None:
    rig.tell(rig.source, nbytes=SIZE)
    rig.tell(rig.source + 2 * SIZE, nbytes=SIZE)
    there = extents([rig.source, rig.source + 2 * SIZE], [(0, SIZE)])
    here = extents([rig.destination, rig.destination + SIZE], [(0, SIZE)])
    assert rig.channel.covers(there)
    assert rig.channel.read(Segments(there, here)).wait(deadline=time.monotonic() + 9) == Progress(2 * SIZE)
    assert np.array_equal(rig.here[SIZE : 2 * SIZE], rig.there[2 * SIZE : 3 * SIZE])


def test_an_address_that_is_registered_again_is_read_with_its_new_key(rig: Rig) -> None:
    """The old key is void: using it would lose the connection."""
    for _ in range(3):
        token = rig.tell(rig.source, nbytes=SIZE)
        rig.check()
        rig.owner.unregister(token)
    assert not rig.world.losses
    assert kind_of(rig.read()) is FaultKind.SOURCE
    assert not rig.channel.covers(rig.plan().source), "what could not be read must be told anew"
    rig.tell(rig.source, nbytes=SIZE)
    rig.check()


def test_memory_of_several_caches_lives_until_the_last_is_gone(rig: Rig) -> None:
    tokens = [rig.tell(rig.source, nbytes=SIZE) for _ in range(3)]
    for token in tokens[:2]:
        rig.owner.unregister(token)
        rig.owner.unregister(token)
        rig.check()
    rig.owner.unregister(tokens[2])
    assert kind_of(rig.read()) is FaultKind.SOURCE


def test_a_destination_with_a_hole_is_refused_before_anything_moves(rig: Rig) -> None:
    """UCX leaves out what follows the hole, and calls that success."""
    rig.tell(rig.source, nbytes=4 * SIZE)
    memory = Mapping(3 * PAGE)
    token = rig.reader.register(region(memory.address, nbytes=3 * PAGE))
    whole = Segments(extents([rig.source], [(0, 3 * PAGE)]), extents([memory.address], [(0, 3 * PAGE)]))
    assert rig.channel.read(whole).wait(deadline=time.monotonic() + 10).fault is None
    memory.view(0, 3 * PAGE)[:] = 0xA5
    assert not LIBC.mprotect(ctypes.c_void_p(memory.address + PAGE), ctypes.c_size_t(PAGE), mmap.PROT_READ)
    progress = rig.channel.read(whole).wait(deadline=time.monotonic() + 10)
    assert kind_of(progress) is FaultKind.DESTINATION and not progress.nbytes
    assert (memory.view(0, 3 * PAGE) == 0xA5).all()
    rig.reader.unregister(token)
    memory.close()


def test_what_is_no_longer_a_destination_is_forgotten_at_once(rig: Rig) -> None:
    """Pages that are mapped there later must not be written through an old registration."""
    rig.tell(rig.source, nbytes=SIZE)
    rig.check()
    rows = {row[:2] for agent in rig.world.readers() for _, row in agent.here}
    assert (rig.destination, rig.destination + 4 * SIZE) in rows
    rig.reader.unregister(rig.own)
    rows = {row[:2] for agent in rig.world.living.values() for _, row in agent.here}
    assert (rig.destination, rig.destination + 4 * SIZE) not in rows
    assert kind_of(rig.read()) is FaultKind.DESTINATION
    made = len(rig.world.made)
    rig.reader.register(region(rig.destination, nbytes=4 * SIZE))
    rig.check()
    assert len(rig.world.made) == made, "the agent that was there"


def test_caches_with_the_same_memory_keep_the_agent(rig: Rig) -> None:
    """Read in turns; the second cache has more tensors."""
    bases = [rig.source, rig.source + 2 * SIZE]
    tokens = [rig.tell(*bases[:1], nbytes=SIZE)]
    rig.check()
    made = len(rig.world.made)
    tokens.append(rig.tell(*bases[:1], nbytes=SIZE))
    rig.check()
    assert len(rig.world.made) == made, "the same memory under another name"
    tokens.append(rig.tell(*bases, nbytes=SIZE))
    rig.check()
    made = len(rig.world.made)
    for token in (*tokens, *tokens):
        rig.channel.admit(token)
        rig.check()
    rig.check(2 * SIZE)
    assert len(rig.world.made) == made


def test_a_plan_that_was_not_covered_is_when_its_token_comes(rig: Rig) -> None:
    source = rig.plan().source
    assert not rig.channel.covers(source)
    rig.tell(rig.source, nbytes=SIZE)
    assert rig.channel.covers(source)


def test_a_known_token_is_loaded_once(rig: Rig) -> None:
    token = rig.tell(rig.source, nbytes=SIZE)
    for _ in range(3):
        rig.channel.admit(token)
        rig.check()
    assert [agent.loads for agent in rig.world.readers()] == [2], "the endpoint and the token"


def test_the_latest_tokens_are_kept(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "NIXL_SOURCES", 2)
    tokens = [rig.tell(rig.source + i * SIZE, nbytes=SIZE) for i in range(3)]
    assert [rig.channel.covers(rig.plan(i * SIZE).source) for i in range(3)] == [False, True, True]
    rig.channel.admit(tokens[0])
    assert [rig.channel.covers(rig.plan(i * SIZE).source) for i in range(3)] == [True, False, True]


@pytest.mark.rule("S.24")
def test_g17_what_a_link_makes_us_and_nixl_remember_is_counted_in_bytes(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent that knows too much is replaced, and what is left out is told again."""
    nbytes = len(rig.owner._serving.metadata("host", np.empty((0, 2), dtype=np.uint64), False)) + 41
    monkeypatch.setattr(limits, "NIXL_SOURCES_NBYTES", 2 * nbytes)
    made = len(rig.world.made)
    for i in range(6):
        rig.tell(rig.source + i * SIZE // 2, nbytes=SIZE // 2)
        rig.check(i * SIZE // 2, SIZE // 2)
        assert sum(source is not None for source in rig.channel._sources.values()) <= 2
        assert all(agent.loads <= 3 for agent in rig.world.readers())
    assert len(rig.world.made) == made + 2, "of six, three times two"
    assert rig.reader._held.nbytes == 2 * nbytes == rig.channel._nbytes


def test_g17_an_agent_that_knows_so_many_tokens_is_replaced(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "NIXL_TOKENS", 3)  # one of them the endpoint's
    made = len(rig.world.made)
    for i in range(6):
        rig.tell(rig.source + i * SIZE // 2, nbytes=SIZE // 2)
        rig.check(i * SIZE // 2, SIZE // 2)
        assert all(agent.loads <= 3 for agent in rig.world.readers())
    assert len(rig.world.made) == made + 2, "of six, three times two"


@pytest.mark.rule("S.24")
def test_g17_all_links_together_keep_so_much(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "NIXL_SOURCES_ENGINE_NBYTES", 600)
    channels = [rig.channel, rig.open(), rig.open()]
    for i in range(12):
        token = rig.owner.register(region(rig.source + i * 100, nbytes=100))
        for channel in channels:
            channel.admit(token)
            assert token[:ID_NBYTES] in channel._sources, "the latest one is kept in any case"
    one = len(msgspec.msgpack.decode(token[ID_NBYTES:], type=Token).metadata)
    assert rig.reader._held.nbytes <= max(600, one * len(channels))
    for channel in channels:
        channel.close()
    rig.channel.admit(token)
    assert not rig.reader._held.nbytes


def test_memory_that_nixl_does_not_know_is_refused(rig: Rig) -> None:
    with pytest.raises(RegistrationRefused, match="no memory type for 'npu'"):
        rig.owner.register(region(rig.source, nbytes=SIZE, memory="npu"))
    with pytest.raises(RegistrationRefused, match="beyond the address space"):
        rig.owner.register(region((1 << 64) - 8, nbytes=SIZE))
    assert rig.owner.register(region(nbytes=SIZE)), "no tensors"
    rig.owner.unregister(b"unknown")


def test_memory_of_another_kind_is_told_with_its_kind(rig: Rig) -> None:
    token = rig.owner.register(region(rig.source, nbytes=SIZE, memory="cuda:1"))
    assert msgspec.msgpack.decode(token[ID_NBYTES:], type=Token).memory == "cuda:1"
    rig.channel.admit(token)
    rig.check()


# ---- the package --------------------------------------------------------------------------------


def test_a_missing_package_is_a_reason_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for package in _nixl._PACKAGES:
        monkeypatch.delitem(sys.modules, f"{package}._bindings", raising=False)
    with pytest.raises(TransportUnavailable, match="not installed: pip install --no-deps nixl-cu12"):
        NixlTransport(lambda n: bytes(n))


def test_a_package_for_another_python_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    package = tmp_path / "nixl_cu12"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('its package must not run')")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in _nixl._PACKAGES:
        monkeypatch.delitem(sys.modules, f"{name}._bindings", raising=False)
    monkeypatch.setattr(_nixl, "_PACKAGES", ("nixl_cu12",))
    with pytest.raises(TransportUnavailable, match=r"nixl_cu12.*no extension module for Python"):
        NixlTransport(lambda n: bytes(n))


def _nothing(*args: object) -> None:
    pass


def _no_ucx(agent: object, name: str, options: object) -> None:
    raise RuntimeError(f"no {name}")


def test_an_agent_that_cannot_be_made_is_a_reason() -> None:
    agent = type("nixlAgent", (), {"__init__": _nothing, "createBackend": _no_ucx, "getNotifs": _nothing})
    bindings = SimpleNamespace(nixlAgentConfig=SimpleNamespace, nixlAgent=agent, NIXL_THREAD_SYNC_RW=0)
    with pytest.raises(TransportUnavailable, match="no agent with UCX for us: no UCX"):
        _nixl._Agent(bindings, "a", True, True)


def test_an_agent_makes_progress_before_it_is_destroyed() -> None:
    """UCX calls abort() for one whose peer has just died, if it is in the middle of taking that endpoint down."""
    calls: list[str] = []

    class Agent:
        def __init__(self, name: str, config: object) -> None:
            pass

        def createBackend(self, name: str, options: object) -> None:  # noqa: N802 - NIXL's
            pass

        def releaseXferReq(self, transfer: int) -> None:  # noqa: N802
            calls.append(f"release {transfer}")
            raise RuntimeError

        def getNotifs(self, known: object, backends: object) -> None:  # noqa: N802
            calls.append("progress")
            raise RuntimeError

        def __del__(self) -> None:
            calls.append("destroy")

    bindings = SimpleNamespace(nixlAgentConfig=SimpleNamespace, nixlAgent=Agent, NIXL_THREAD_SYNC_RW=0)
    agent = _nixl._Agent(bindings, "a", False, True)
    agent.close([1, 2])
    agent.close([])
    assert calls == ["release 1", "release 2", "progress", "destroy"]
