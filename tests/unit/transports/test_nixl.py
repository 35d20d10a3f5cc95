"""Transport ``nixl`` with agents that are not NIXL's: what it makes of their rules and failures."""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.util
import itertools
import mmap
import sys
import time
from collections.abc import Callable, Iterator
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
from llm_datadist.transports.nixl_told import ID_NBYTES, Endpoint, Token
from llm_datadist.transports.seam import (
    FaultKind,
    Progress,
    RegistrationRefused,
    TransportUnavailable,
)
from tests.support.fake_nixl import buffer, written
from tests.support.local_pair import PROOF
from tests.support.memory import PAGE, Mapping
from tests.support.nixl_rig import SIZE, Rig, endpoint, kind_of, region

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


# ---- lies ---------------------------------------------------------------------------------------


def _changed(**changes: Any) -> Callable[[bytes], bytes]:
    def change(token: bytes) -> bytes:
        told = msgspec.structs.replace(msgspec.msgpack.decode(token[ID_NBYTES:], type=Token), **changes)
        return token[:ID_NBYTES] + msgspec.msgpack.encode(told)

    return change


@pytest.mark.parametrize(
    "lie",
    [
        lambda token: b"",
        lambda token: token[:5],
        lambda token: token[:-1],
        lambda token: token[:ID_NBYTES] + b"\xff" * 100,
        _changed(agent="another"),
        _changed(metadata=b""),
        _changed(metadata=b"nixlSerDes|Agent" + (1 << 60).to_bytes(8, "little") + b"x"),
        _changed(metadata=b"nixlSerDes|Agent" + (3).to_bytes(8, "little") + b"abc|"),
        _changed(memory="npu"),
        _changed(memory="cuda:one"),
        _changed(memory="cuda:" + "9" * 5000),
        _changed(memory="cuda:1"),
        _changed(rows=b"123"),
    ],
)
def test_a_token_that_is_no_good_is_left_out(rig: Rig, lie: Callable[[bytes], bytes]) -> None:
    token = rig.owner.register(region(rig.source, nbytes=SIZE))
    rig.channel.admit(lie(token))
    assert not rig.channel.covers(rig.plan().source)
    assert kind_of(rig.read()) is FaultKind.SOURCE
    assert [agent.loads for agent in rig.world.readers()] == [1], "NIXL never sees it"
    other = rig.owner.register(region(rig.source, nbytes=SIZE))
    rig.channel.admit(other)
    rig.check()


@pytest.mark.rule("S.40")
def test_g16_ranges_that_the_metadata_do_not_have_are_left_out(rig: Rig) -> None:
    """NIXL and we believe the same of it."""
    token = rig.owner.register(region(rig.source, nbytes=SIZE))
    rows = np.array([[rig.source, rig.source + 3 * SIZE]], dtype="<u8").tobytes()
    rig.channel.admit(_changed(rows=rows)(token))
    assert not rig.channel.covers(rig.plan().source)
    assert kind_of(rig.read(0, 3 * SIZE)) is FaultKind.SOURCE
    assert not rig.here.any()
    rig.channel.admit(rig.owner.register(region(rig.source, nbytes=2 * SIZE)))
    rig.check()


@pytest.mark.rule("S.43")
def test_g16_a_connection_comes_with_the_endpoint_alone(rig: Rig) -> None:
    """What has another in it, of whatever agent in the name of the peer, NIXL never sees."""
    row = [rig.source, rig.source + SIZE]
    name = rig.owner._serving.name
    rows, metadata = np.array([row], dtype="<u8").tobytes(), written(name, "host", [row], [1], True)
    token = Token(agent=name, memory="host", rows=rows, metadata=metadata)
    rig.channel.admit(bytes(ID_NBYTES) + msgspec.msgpack.encode(token))
    assert kind_of(rig.read()) is FaultKind.SOURCE
    assert [agent.loads for agent in rig.world.readers()] == [1]


@pytest.mark.rule("S.41")
@pytest.mark.parametrize("within_host", [True, False])
def test_g16_what_processes_of_a_host_share_is_for_peers_of_this_host(rig: Rig, within_host: bool) -> None:
    """Which process UCX reads there, the address that the peer has given says."""
    told = dataclasses.replace(endpoint(rig.owner.endpoint(PROOF)), within_host=within_host)
    before = len(rig.world.made)
    rig.reader.open(told, deadline=time.monotonic() + 10).close()
    (made,) = rig.world.made[before:]
    assert made.within_host is within_host
    assert rig.owner._serving.within_host  # type: ignore[attr-defined]


@pytest.mark.rule("S.41")
def test_g16_ucx_shares_nothing_with_peers_of_other_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the user has said what it may use."""
    for name in (_nixl._CONNECT, _nixl._MEANS):
        monkeypatch.delenv(name, raising=False)
    assert _nixl._config(True) == {"engine_config": "TCP_CONN_NB=y"}
    assert _nixl._config(False) == {"engine_config": "TCP_CONN_NB=y,TLS=^sm"}
    monkeypatch.setenv(_nixl._MEANS, "rc")
    assert _nixl._config(False) == _nixl._config(True) == {"engine_config": "TCP_CONN_NB=y"}
    monkeypatch.setenv(_nixl._CONNECT, "n")
    assert _nixl._config(False) == {}


def test_memory_that_was_offered_is_all_that_a_peer_hears_of_before_it_has_a_link(rig: Rig) -> None:
    told = msgspec.msgpack.decode(rig.owner.endpoint(PROOF), type=Endpoint)
    rig.owner.register(region(rig.source, nbytes=SIZE))
    later = msgspec.msgpack.decode(rig.owner.endpoint(PROOF), type=Endpoint)
    assert (later.rows, later.metadata) == (told.rows, told.metadata)
    ((start, end),) = np.frombuffer(told.rows, dtype="<u8").reshape(-1, 2).tolist()
    assert (
        start <= told.proof_address < told.nonce_address + 2 * SIZE and end - start == rig.owner._page.nbytes
    )


@pytest.mark.parametrize("blob", [b"", b"garbage", msgspec.msgpack.encode({"agent": "x"})])
def test_an_endpoint_that_is_no_good_is_a_reason(rig: Rig, blob: bytes) -> None:
    with pytest.raises(TransportUnavailable, match="not valid"):
        rig.reader.open(endpoint(blob), deadline=time.monotonic() + 1)


def test_g16_another_proof_is_another_process(rig: Rig) -> None:
    blob = rig.owner.endpoint(PROOF)
    rig.owner.hide(PROOF)
    with pytest.raises(TransportUnavailable, match="another process"):
        rig.reader.open(endpoint(blob), deadline=time.monotonic() + 1)
    with pytest.raises(TransportUnavailable, match="this very connection"):
        rig.reader.open(endpoint(rig.owner.endpoint(PROOF[::-1])), deadline=time.monotonic() + 1)


def test_a_peer_that_nobody_can_connect_to_is_a_reason(rig: Rig) -> None:
    rig.world.unreachable |= {rig.owner._serving.name}
    with pytest.raises(TransportUnavailable, match="cannot be reached with NIXL"):
        rig.open()


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
