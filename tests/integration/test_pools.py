"""Rows R2, R3 and M4, and §6: pools at init, exhausted, forked, finalized and killed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import llm_datadist as dd
from llm_datadist import DataType, LLMException, LLMStatusCode, OutOfMemoryError, Placement
from tests.support import actors, allocated
from tests.support.pair import D_ID, P_ID, SEED, SUCCESS, Pair, Shape, of_model
from tests.support.pool import Spawner
from tests.support.which_combos import THREE
from tests.support.world import World

MIB = 1 << 20
GONE = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
INVALID = LLMStatusCode.LLM_PARAM_INVALID
ROUNDS = [10, pytest.param(500, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
KILLS = [3, pytest.param(50, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.rule("6.37", "6.70", "6.74", "6.75")
def test_r2_pool_memory_comes_back_and_is_refused_only_when_it_is_out(pair: Pair, rounds: int) -> None:
    pair.up(timeout_ms=10_000, MemPoolConfig=allocated.pool(64 * MIB))
    pair.source(shape=Shape(tensors=4, dim0=4, stride=MIB // 4))
    pair.d.call(_allocate_pull_deallocate, rounds, timeout=500)
    assert pair.d.call(allocated.all_free)
    pair.d.call(_until_refused)


def _allocate_pull_deallocate(w: World, rounds: int) -> None:
    manager = w.dist.cache_manager
    for at in range(rounds):
        cache = manager.allocate_blocks_cache(allocated.desc_of(4, 4, MIB // 4))
        manager.pull_blocks(of_model(0), cache, [at % 4], [0])
        manager.deallocate_blocks_cache(cache)


def _until_refused(w: World) -> None:
    manager, caches = w.dist.cache_manager, []
    one = allocated.desc_of(1, 1, MIB)
    try:
        while True:
            caches.append(manager.allocate_cache(one))
    except OutOfMemoryError as exc:
        assert exc.status_code == LLMStatusCode.LLM_OUT_OF_MEMORY
        assert str(MIB) in str(exc) and "largest free piece has 0" in str(exc)
    assert len(caches) == 64
    info = manager.pool_info(Placement.DEVICE)
    assert (info.free_nbytes, info.largest_free_nbytes, info.allocations) == (0, 0, 64)
    manager.deallocate_cache(caches.pop(20))
    manager.deallocate_cache(caches.pop(40))
    try:
        manager.allocate_cache(allocated.desc_of(1, 2, MIB))
        raise AssertionError("two pieces of 1 MiB are not one of 2 MiB")
    except OutOfMemoryError as exc:
        text = str(exc)
    assert str(2 * MIB) in text and f"{2 * MIB} are free" in text and f"largest free piece has {MIB}" in text
    caches += [manager.allocate_cache(one), manager.allocate_cache(one)]
    assert len({c.tensor_addrs[0] for c in caches}) == 64


def _files() -> set[str]:
    """Shared memory and temporary files with our name, of whatever process."""
    folders = [folder for folder in ("/dev/shm", "/tmp") if os.path.isdir(folder)]
    found = {os.path.join(folder, name) for folder in folders for name in os.listdir(folder)}
    return {name for name in found if "llm-datadist" in name or "llm_datadist" in name}


def _sockets_of(pid: int) -> set[str]:
    """Inodes of a process's sockets. Names do not do: other processes of this machine may have such, too."""
    links = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
    return {link[8:-1] for link in links if link.startswith("socket:[")}


def _unix_sockets() -> set[str]:
    return {line.split()[6] for line in Path("/proc/net/unix").read_text().splitlines()[1:]}


@THREE
@pytest.mark.parametrize("rounds", KILLS)
def test_r3_a_killed_process_leaves_nothing_and_the_next_starts(
    spawn: Spawner, combo: Any, rounds: int
) -> None:
    d = spawn()
    d.call(actors.up, D_ID, actors.options(combo.mode, combo.backend))
    d.call(actors.blocks_cache, "dst")
    before = _files()
    port = 0
    for at in range(rounds):
        p = spawn()
        listen = f"127.0.0.1:{port}"
        more = {"MemPoolConfig": allocated.pool(32 * MIB), "HostMemPoolConfig": allocated.pool(MIB)}
        address = p.call(actors.up, P_ID, actors.options(combo.mode, combo.backend, listen, **more))
        port = address[1]
        p.call(allocated.blocks, "src", model_id=0, seed=SEED + at)
        assert d.call(actors.link, [(P_ID, address)])[0] == SUCCESS
        d.call(actors.refill, "dst", None)
        d.call(actors.pull_blocks, of_model(0), "dst", [1], [2])
        text = d.call(
            actors.compare, "dst", seed=SEED + at, src_tensor_nbytes=8 * 1024, pieces=[(1024, 2048, 1024)]
        )
        assert not text, text
        sockets = _sockets_of(p.pid)
        assert sockets & _unix_sockets() or combo.backend == "tcp"
        p.kill()
        assert not sockets & _unix_sockets()
        assert _files() == before


@pytest.mark.rule("6.13", "6.15", "6.46")
def test_m4_a_refused_registration_or_allocation_leaves_nothing(pair: Pair) -> None:
    pair.up(MemPoolConfig=allocated.pool(MIB))
    pair.destination()
    pair.p.call(_refusals, pair.combo.backend == "shm")
    pair.pull_blocks([0], [0], of_model(4)).expect(GONE)
    pair.unchanged()
    assert pair.p.call(_succeeds) == 1
    pair.pull_blocks([0], [0], of_model(4)).ok()


def _refusals(w: World, has_host_pool: bool) -> None:
    manager = w.dist.cache_manager
    good, desc, key = w.hold("good", 1, MIB).mapping, allocated.desc_of(2, 8, 1024), dd.BlocksCacheKey(0, 4)
    before = manager.caches(), manager.pool_info(Placement.DEVICE)
    request = dd.CacheKey(0, 1)
    calls = [
        (lambda: manager.register_blocks_cache(desc, [good.address, 0x1000], key), INVALID),
        (lambda: manager.register_cache(desc, [good.address] * 2, [request, request]), INVALID),
        (lambda: manager.allocate_cache(desc, [request] * 2), INVALID),
        (lambda: manager.allocate_cache(desc, [request] * 9), INVALID),
        (lambda: manager.allocate_cache(desc, [dd.CacheKey(0, 1, 0, 2)]), INVALID),
        (
            lambda: manager.allocate_blocks_cache(allocated.desc_of(17, 1, 1 << 16), key),
            LLMStatusCode.LLM_OUT_OF_MEMORY,
        ),
        (lambda: manager.allocate_cache(dd.CacheDesc(1, [4, 0], DataType.DT_INT8)), INVALID),
    ]
    if not has_host_pool:
        calls.append(
            (lambda: manager.allocate_blocks_cache(allocated.desc_of(2, 8, 1024, "HOST"), key), INVALID)
        )
    for call, code in calls:
        try:
            call()
        except LLMException as exc:
            assert exc.status_code == code, repr(exc)
        else:
            raise AssertionError("not refused")
        assert (manager.caches(), manager.pool_info(Placement.DEVICE)) == before


def _succeeds(w: World) -> int:
    manager, good = w.dist.cache_manager, w.held["good"].mapping
    desc, key = allocated.desc_of(2, 8, 1024), dd.BlocksCacheKey(0, 4)
    return int(manager.register_blocks_cache(desc, [good.address, good.address + 8192], key).cache_id)


# ---- one process -------------------------------------------------------------------------------------------


def options(**more: str) -> dict[str, str]:
    return actors.options("A", "auto", **more)


@pytest.fixture
def dist() -> Iterator[dd.LLMDataDist]:
    made = dd.LLMDataDist(dd.LLMRole.MIX, 1)
    yield made
    made.finalize()


@pytest.mark.rule("3.14")
def test_a_pool_that_cannot_be_had_is_refused_at_init_and_leaves_nothing(dist: dd.LLMDataDist) -> None:
    fds = len(os.listdir("/proc/self/fd"))
    with pytest.raises(
        OutOfMemoryError, match=f"pool of mem_pool_cfg.*{1 << 50} bytes are asked for"
    ) as caught:
        dist.init(options(HostMemPoolConfig=allocated.pool(MIB), MemPoolConfig=allocated.pool(1 << 50)))
    assert caught.value.status_code == LLMStatusCode.LLM_OUT_OF_MEMORY
    assert "llm-datadist-pool" not in Path("/proc/self/maps").read_text()
    assert len(os.listdir("/proc/self/fd")) == fds
    dist.init(options(MemPoolConfig=allocated.pool(MIB)))
    assert dist.cache_manager.pool_info(Placement.DEVICE).total_nbytes == MIB


@pytest.mark.rule("3.44")
@pytest.mark.parametrize(
    "text",
    ["", "[]", "7", "{}", '{"memory_size": 0}', '{"memory_size": 65535}', allocated.pool(1 << 16, 9)],
)
@pytest.mark.parametrize("key", ["MemPoolConfig", "HostMemPoolConfig"])
@pytest.mark.rule("3.46", "6.61", "6.63", "6.64")
def test_a_bad_pool_option_is_refused_at_init(dist: dd.LLMDataDist, key: str, text: str) -> None:
    with pytest.raises(dd.ParamInvalidError, match=f"llm.{key}"):
        dist.init(options(**{key: text}))


@pytest.mark.rule("6.36")
def test_a_placement_without_a_pool_is_named_with_its_property(dist: dd.LLMDataDist) -> None:
    dist.init(options())
    for placement, name in (
        (Placement.DEVICE, "LLMConfig.mem_pool_cfg"),
        (Placement.HOST, "LLMConfig.host_mem_pool_cfg"),
    ):
        desc = dd.CacheDesc(1, [4], DataType.DT_INT8, placement)
        for call in (
            lambda desc=desc: dist.cache_manager.allocate_cache(desc),
            lambda desc=desc: dist.cache_manager.allocate_blocks_cache(desc),
            lambda placement=placement: dist.cache_manager.pool_info(placement),
        ):
            with pytest.raises(dd.ParamInvalidError, match=name):
                call()


@pytest.mark.rule("6.65")
def test_unknown_fields_of_a_pool_are_one_warning(
    dist: dd.LLMDataDist, caplog: pytest.LogCaptureFixture
) -> None:
    dist.init(options(MemPoolConfig='{"memory_size": 1048576, "huge_pages": true, "numa": [1]}'))
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "huge_pages" in warnings[0] and "numa" in warnings[0]
    assert dist.cache_manager.pool_info(Placement.DEVICE).total_nbytes == MIB


@pytest.mark.rule("6.14", "6.44", "6.45")
def test_what_is_not_allocated_is_left_alone(dist: dd.LLMDataDist) -> None:
    dist.init(options(MemPoolConfig=allocated.pool(MIB)))
    manager = dist.cache_manager
    pooled = manager.allocate_cache(allocated.desc_of(1, 1, MIB))
    desc = allocated.desc_of(1, 2, 1024)
    slots = manager.register_cache(desc, [pooled.tensor_addrs[0]])
    paged = manager.register_blocks_cache(desc, [pooled.tensor_addrs[0]])
    manager.deallocate_cache(slots)
    manager.deallocate_blocks_cache(paged)
    manager.deallocate_cache(dd.Cache(99, desc, [4096]))
    manager.deallocate_blocks_cache(dd.Cache(99, desc, [4096], True))
    assert [c.cache_id for c in manager.caches()] == [1, 2, 3]
    for wrong in (lambda: manager.deallocate_blocks_cache(pooled), lambda: manager.deallocate_cache(paged)):
        with pytest.raises(dd.ParamInvalidError, match="use deallocate"):
            wrong()
    manager.deallocate_cache(pooled)
    manager.deallocate_cache(pooled)
    assert [c.cache_id for c in manager.caches()] == [2, 3]


@pytest.mark.rule("6.35", "6.62", "6.66", "6.67", "6.71")
def test_a_tail_under_a_page_is_not_used_and_small_pages_work(dist: dd.LLMDataDist) -> None:
    dist.init(
        options(MemPoolConfig=allocated.pool(3 * MIB + 1), HostMemPoolConfig=allocated.pool(5 * 1024 + 7, 10))
    )
    manager = dist.cache_manager
    assert manager.pool_info(Placement.DEVICE).total_nbytes == 3 * MIB
    host = manager.pool_info(Placement.HOST)
    assert (host.total_nbytes, host.largest_free_nbytes) == (5 * 1024, 5 * 1024)
    caches = [manager.allocate_cache(allocated.desc_of(1, 1, 1024, "HOST")) for _ in range(5)]
    assert all(c.tensor_addrs[0] % 1024 == 0 for c in caches)
    first = manager.allocate_cache(allocated.desc_of(1, 1, 1))
    assert first.tensor_addrs[0] % (1 << 16) == 0
    assert manager.pool_info(Placement.DEVICE).free_nbytes == 3 * MIB - (1 << 16)


@pytest.mark.rule("3.11")
def test_finalize_gives_the_pools_back_and_the_next_life_starts_at_1(dist: dd.LLMDataDist) -> None:
    ids = []
    for _ in range(2):
        dist.init(options(MemPoolConfig=allocated.pool(MIB)))
        cache = dist.cache_manager.allocate_cache(allocated.desc_of(1, 1, MIB))
        ids.append(cache.cache_id)
        dist.finalize()
        assert "llm-datadist-pool" not in Path("/proc/self/maps").read_text()
    assert ids == [1, 1]
    dist.init(options(MemPoolConfig=allocated.pool(MIB)))
    fresh = dist.cache_manager.allocate_cache(allocated.desc_of(1, 1, MIB))
    dist.cache_manager.deallocate_cache(cache)
    assert [c.cache_id for c in dist.cache_manager.caches()] == [fresh.cache_id]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_f1_a_forked_child_neither_keeps_nor_changes_the_pool(dist: dd.LLMDataDist) -> None:
    dist.init(options(MemPoolConfig=allocated.pool(MIB)))
    cache = dist.cache_manager.allocate_cache(allocated.desc_of(1, 1, MIB))
    mine = allocated.PoolView(cache.tensor_addrs[0], MIB).view(0, MIB)
    mine[:] = 7
    pid = os.fork()
    if not pid:
        kept = "llm-datadist-pool" in Path("/proc/self/maps").read_text()
        code = 1 if mine.any() or kept else 0
        mine[:] = 9
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert (mine == 7).all()
    assert dist.cache_manager.pool_info(Placement.DEVICE).free_nbytes == 0
