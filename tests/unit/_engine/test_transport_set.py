"""The transports of an engine: which there are, what peers are offered, and what is registered. NIXL is a fake."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from llm_datadist import (
    BlocksCacheKey,
    CacheDesc,
    DataType,
    FeatureNotEnabledError,
    LLMDataDist,
    LLMRole,
    LLMStatusCode,
    OutOfMemoryError,
    ParamInvalidError,
)
from llm_datadist._engine import transport_set
from llm_datadist.transports import _nixl, nixl
from llm_datadist.transports.local import LocalTransport
from llm_datadist.transports.nixl import NixlTransport
from llm_datadist.transports.nixl_told import ID_NBYTES, Endpoint, Token
from llm_datadist.transports.seam import TransportUnavailable
from llm_datadist.transports.shm import ShmTransport
from tests.support import actors, leaks
from tests.support.allocated import pool
from tests.support.engines import Engines
from tests.support.fake_nixl import World
from tests.support.local_pair import PROOF
from tests.support.memory import FILL, bytes_at

SUCCESS = LLMStatusCode.LLM_SUCCESS
POOL = {"MemPoolConfig": pool(1 << 20), "HostMemPoolConfig": pool(1 << 20)}


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[World]:
    """NIXL is installed, with agents of a fake, and there is an RDMA device."""
    world = World()
    (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setattr(nixl, "RDMA_DEVICES", tmp_path)
    monkeypatch.setattr(_nixl, "check_installed", lambda: None)
    monkeypatch.setattr(_nixl, "agents", lambda: world.agents)
    yield world
    assert not world.living, "agents stay"


def engine(backend: str = "auto", mode: str = "B", **more: str) -> LLMDataDist:
    made = LLMDataDist(LLMRole.MIX, 1)
    made.init(actors.options(mode, backend, "127.0.0.1:0", AllowMultipleInstances="1", **more))
    return made


def parts(made: Any) -> Any:
    return made._engine._transports


def offered(made: Any) -> set[str]:
    found = set(parts(made).show(PROOF))
    parts(made).hide(PROOF)
    return found


@pytest.mark.parametrize(
    ("backend", "pools", "opened", "offers"),
    [
        ("auto", {}, {"shm", "local", "nixl", "tcp"}, {"local", "nixl", "tcp", "words"}),
        ("auto", POOL, {"shm", "local", "nixl", "tcp"}, {"shm", "local", "nixl", "tcp", "words"}),
        ("nixl", {}, {"nixl"}, {"nixl"}),
        ("tcp", POOL, {"tcp"}, {"tcp"}),
        ("local", POOL, {"local"}, {"local", "words"}),
        ("shm", {}, {"shm"}, {"shm", "words"}),
    ],
)
def test_what_there_is_and_what_is_offered(
    world: World, backend: str, pools: dict[str, str], opened: set[str], offers: set[str]
) -> None:
    made = engine(backend, **pools)
    try:
        assert set(parts(made).opened) == opened
        assert offered(made) == offers
        assert not parts(made).missing
    finally:
        made.finalize()


@pytest.mark.rule("S.42")
def test_before_a_link_peers_are_told_of_words_and_of_nothing_else(world: World) -> None:
    """Pools are registered whole, and told of with the first cache in them."""
    made = engine("nixl", **POOL)
    try:
        (agent,) = world.living.values()
        state: Any = parts(made)._state
        ranges = {row[:2] for _, row in agent.here}
        address, nbytes = state.slab.bounds
        told = msgspec.msgpack.decode(parts(made).show(PROOF)["nixl"], type=Endpoint)
        parts(made).hide(PROOF)
        offered = set(map(tuple, np.frombuffer(told.rows, dtype="<u8").reshape(-1, 2).tolist()))
        assert len(offered) == 2 and (address, address + nbytes) in offered, "and the proofs"
        assert len(state.pools.bounds) == 2
        assert {(start, start + size) for start, size in state.pools.bounds.values()} <= ranges - offered
        cache = made.cache_manager.allocate_blocks_cache(CacheDesc(2, [4, 64], DataType.DT_UINT8))
        token = state.regions.token(cache.cache_id, ("nixl",))
        rows = np.frombuffer(msgspec.msgpack.decode(token[ID_NBYTES:], type=Token).rows, dtype="<u8")
        assert set(map(tuple, rows.reshape(-1, 2).tolist())) <= ranges - offered
    finally:
        made.finalize()


def test_a_forced_one_that_is_missing_fails_at_init(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise TransportUnavailable(_nixl._NOT_INSTALLED)

    monkeypatch.setattr(_nixl, "agents", missing)
    with pytest.raises(FeatureNotEnabledError) as told:
        engine("nixl")
    assert told.value.status_code == LLMStatusCode.LLM_FEATURE_NOT_ENABLED
    for part in ("llm.TransferBackend", "'nixl'", "pip install --no-deps nixl-cu12", "'auto'"):
        assert part in str(told.value)


def test_auto_does_without_what_is_not_worth_it(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """No RDMA device: NIXL is not even loaded."""
    monkeypatch.setattr(nixl, "RDMA_DEVICES", tmp_path / "nowhere")
    made = engine()
    try:
        assert "nixl" not in parts(made).opened and "nixl" not in offered(made)
        assert parts(made).missing["nixl"].startswith(f"there is no RDMA device here ({tmp_path}/nowhere)")
        assert not world.made
    finally:
        made.finalize()


def _failing(kind: type, number: int, patch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **named: Any) -> None:
        raise OSError(number, os.strerror(number))

    patch.setattr(kind, "__init__", fail)


@pytest.mark.parametrize("kind", [ShmTransport, LocalTransport, NixlTransport])
@pytest.mark.parametrize("number", [errno.EPERM, errno.EAFNOSUPPORT, errno.ENOSYS])
def test_g8_one_that_this_system_does_not_have_is_left_out_with_its_reason(
    world: World, monkeypatch: pytest.MonkeyPatch, kind: Any, number: int
) -> None:
    """No abstract sockets, no memfd, a profile that forbids a call: whatever the system says."""
    _failing(kind, number, monkeypatch)
    with Engines("B", "auto") as engines:
        owner, reader = engines.make(1), engines.make(2)
        assert kind.name not in parts(reader).opened and kind.name not in offered(reader)
        assert engines.link(reader, 1, owner) == SUCCESS
        reason = f"this system does not let it be opened: {os.strerror(number)}"
        assert parts(reader).missing[kind.name] == reason
        if kind is not NixlTransport:  # that one comes after local, which reaches everything
            assert f"{kind.name}: {reason}" in _chosen(reader)[1]
        _move_both_ways(engines, owner, reader, "B")
    before = leaks.take()
    with pytest.raises(FeatureNotEnabledError, match=re.escape(os.strerror(number))) as told:
        engine(kind.name)
    assert f"{kind.name!r}, which is not to be had here" in str(told.value)
    assert not leaks.differences(before)


@pytest.mark.parametrize("kind", [ShmTransport, LocalTransport, NixlTransport])
@pytest.mark.parametrize("backend", ["auto", "forced"])
def test_g8_what_is_merely_short_is_no_reason_to_do_without_it(
    world: World, monkeypatch: pytest.MonkeyPatch, kind: Any, backend: str
) -> None:
    backend = kind.name if backend == "forced" else backend
    _failing(kind, errno.EMFILE, monkeypatch)
    before = leaks.take()
    with pytest.raises(OutOfMemoryError, match="RLIMIT_NOFILE") as told:
        engine(backend)
    assert f"transport {kind.name} cannot be opened" in str(told.value)
    assert not leaks.differences(before)
    monkeypatch.undo()


def _without_memfd(patch: pytest.MonkeyPatch, number: int, pools: int = 2) -> None:
    """The system refuses the memory of that many pools, as any other."""
    real, left = os.memfd_create, iter(range(pools))

    def create(name: str, flags: int) -> int:
        if "pool" in name and next(left, None) is not None:
            raise OSError(number, os.strerror(number))
        return real(name, flags)

    patch.setattr(os, "memfd_create", create)


REFUSED = [errno.EMFILE, errno.ENFILE, errno.EPERM, errno.ENOSYS]


@pytest.mark.parametrize("number", REFUSED)
def test_g8_a_pool_without_a_memfd_is_read_some_other_way(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    _without_memfd(monkeypatch, number)
    with caplog.at_level("INFO", "llm_datadist.link"), Engines("B", "auto") as engines:
        owner, reader = engines.make(1, MemPoolConfig=POOL["MemPoolConfig"]), engines.make(2)
        (line,) = (text for text in caplog.messages if "pool" in text)
        assert "mem_pool_cfg" in line and os.strerror(number) in line and "shm" in line
        assert "shm" not in offered(owner) and "words" in offered(owner)
        assert engines.link(reader, 1, owner) == SUCCESS
        assert _chosen(reader)[0] == "local" and "shares no memory" in _chosen(reader)[1][0]
        desc = CacheDesc(4, [4, 64], DataType.DT_UINT8)
        pooled = owner.cache_manager.allocate_blocks_cache(desc, BlocksCacheKey(0, 0))
        for address in pooled.tensor_addrs:
            bytes_at(address, 256)[:] = 7
        cache, into = engines.blocks(reader)
        reader.cache_manager.pull_blocks(BlocksCacheKey(1, 0), cache, [1, 2], [2, 3])
        assert (into[:, 2:] == 7).all() and (into[:, :2] == FILL).all()


def test_g8_a_pool_that_is_shared_beside_one_that_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    _without_memfd(monkeypatch, errno.EPERM, pools=1)
    made = engine(**POOL)
    assert "shm" in offered(made) and len(parts(made)._state.pools.areas) == 1
    made.finalize()


@pytest.mark.parametrize("number", REFUSED)
def test_g8_a_pool_without_a_memfd_where_shm_is_forced(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """As with what else it needs: LLM_OUT_OF_MEMORY for a shortage, LLM_FEATURE_NOT_ENABLED for what there is not."""
    before = leaks.take()
    is_short = number in (errno.EMFILE, errno.ENFILE)
    with monkeypatch.context() as patch:
        _without_memfd(patch, number)
        with pytest.raises(OutOfMemoryError if is_short else FeatureNotEnabledError) as told:
            engine("shm")
    where = "file" if is_short else "the pool of host_mem_pool_cfg"
    assert all(part in str(told.value) for part in (os.strerror(number), "shm", where))
    assert not leaks.differences(before)
    engine("shm").finalize()


@pytest.mark.parametrize("backend", ["local", "tcp"])
def test_a_pool_without_a_memfd_where_nothing_shares_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, backend: str
) -> None:
    _without_memfd(monkeypatch, errno.EPERM)
    with caplog.at_level("INFO", "llm_datadist"):
        made = engine(backend, **POOL)
    assert not any("pool" in text for text in caplog.messages)
    made.finalize()


def test_close_is_for_all_and_may_be_called_again(world: World) -> None:
    made = engine(**POOL)
    transports = parts(made)
    made.finalize()
    transports.close()
    assert not world.living


# ---- two engines, as if each were on a host of its own ------------------------------------------------------------


def _elsewhere(*args: Any, **more: Any) -> Any:
    raise TransportUnavailable("the peer is on another host")


@pytest.fixture
def two_hosts(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(LocalTransport, "open", _elsewhere)
    monkeypatch.setattr(ShmTransport, "open", _elsewhere)
    return world


def _linked(engines: Engines) -> tuple[Any, Any]:
    owner, reader = engines.make(1), engines.make(2)
    assert engines.link(reader, 1, owner) == SUCCESS
    return owner, reader


def _chosen(engine: Any) -> tuple[str, tuple[str, ...]]:
    (link,) = engine.links()
    return link.transport, link.reasons


@pytest.mark.parametrize("mode", ["A", "B"])
def test_auto_on_one_host_takes_local(world: World, mode: str) -> None:
    with Engines(mode, "auto") as engines:
        owner, reader = _linked(engines)
        assert _chosen(reader)[0] == _chosen(owner)[0] == "local"
        assert len(world.made) == 2, "the serving agents; none to read with"


@pytest.mark.parametrize("mode", ["A", "B"])
def test_auto_between_hosts_takes_nixl_and_tcp_for_the_rest(two_hosts: World, mode: str) -> None:
    with Engines(mode, "auto") as engines:
        owner, reader = _linked(engines)
        transport, reasons = _chosen(reader)
        assert transport == "nixl+tcp"
        assert reasons == (
            "shm: the peer shares no memory: it has no pool, or its system does not let it",
            "local: the peer is on another host",
            "nixl: chosen for memory registered with NIXL",
            "tcp: chosen for the rest",
        )
        _move_both_ways(engines, owner, reader, mode)
        assert sum(agent.loads for agent in two_hosts.made), "nothing went by NIXL"


def _move_both_ways(engines: Engines, owner: Any, reader: Any, mode: str) -> None:
    _, source = engines.blocks(owner, 5, 0)
    cache, into = engines.blocks(reader, model_id=1)
    reader.cache_manager.pull_blocks(BlocksCacheKey(1, 0), cache, [1, 2], [0, 3])
    assert (into[:, [0, 3]] == 5).all() and (into[:, [1, 2]] == FILL).all()
    if mode == "B":
        source[:] = 6
        mine = owner.cache_manager.caches()[0]
        handle = engines.register(owner, source, 7)
        owner.cache_manager.push_blocks(BlocksCacheKey(2, 1), handle, [1], [1])
        assert mine.cache_id != handle.cache_id and (into[:, 1] == 6).all()


@pytest.mark.parametrize("mode", ["A", "B"])
def test_memory_that_nixl_refuses_goes_by_tcp(
    two_hosts: World, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A source that cannot be registered; forced, it is out of reach and says so."""
    _refuse_size(monkeypatch, 4 * 64)
    with Engines(mode, "auto") as engines:
        owner, reader = _linked(engines)
        engines.register(owner, np.full((4, 4, 64), 5, np.uint8), 0)
        cache, into = engines.blocks(reader)
        reader.cache_manager.pull_blocks(BlocksCacheKey(1, 0), cache, [1], [2])
        assert (into[:, 2] == 5).all()
    with Engines(mode, "nixl") as engines:
        owner, reader = _linked(engines)
        engines.register(owner, np.full((4, 4, 64), 5, np.uint8), 0)
        cache, into = engines.blocks(reader)
        with pytest.raises(ParamInvalidError, match="is not in memory that nixl reaches"):
            reader.cache_manager.pull_blocks(BlocksCacheKey(1, 0), cache, [1], [2])
        assert (into == FILL).all()


@pytest.mark.parametrize("mode", ["A", "B"])
def test_a_destination_that_nixl_refuses_goes_by_tcp(
    two_hosts: World, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source is within reach; forced, the pull says what is wrong with the destination."""
    refused: list[int] = []
    register = NixlTransport.register

    def refusing(transport: NixlTransport, region: Any) -> bytes:
        if int(region.bases[0]) in refused:
            raise nixl.RegistrationRefused("not this memory")
        return register(transport, region)

    monkeypatch.setattr(NixlTransport, "register", refusing)
    for backend in ("auto", "nixl"):
        with Engines(mode, backend) as engines:
            owner, reader = _linked(engines)
            engines.blocks(owner, 5, 0)
            into = np.full((4, 4, 64), FILL, np.uint8)
            refused.append(int(into.ctypes.data))
            cache = engines.register(reader, into)
            if backend == "auto":
                reader.cache_manager.pull_blocks(BlocksCacheKey(1, 0), cache, [1], [2])
                assert (into[:, 2] == 5).all()
                continue
            with pytest.raises(ParamInvalidError, match="not within memory that is registered with NIXL"):
                reader.cache_manager.pull_blocks(BlocksCacheKey(1, 0), cache, [1], [2])
            assert (into == FILL).all()


def _refuse_size(patch: pytest.MonkeyPatch, nbytes: int) -> None:
    """Memory of the owners' tensors cannot be registered: known by its size."""
    register = NixlTransport.register

    def refusing(transport: NixlTransport, region: Any) -> bytes:
        if region.nbytes == nbytes:
            raise nixl.RegistrationRefused("not this memory")
        return register(transport, region)

    patch.setattr(NixlTransport, "register", refusing)


def test_a_peer_without_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forced here, not to be had there."""
    with Engines("B", "auto") as others, Engines("B", "nixl") as engines:
        monkeypatch.setattr(transport_set, "check_worth_it", _elsewhere)  # not asked where it is forced
        peer = others.make(1)
        reader = engines.make(2)
        assert engines.link(reader, 1, peer) == LLMStatusCode.LLM_LINK_FAILED
        told = reader.link_error(1)
        assert told is not None and "nixl" in told
