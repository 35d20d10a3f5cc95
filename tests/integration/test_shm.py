"""Faults of transport ``shm``: what the combinations of modes and transports do not show by themselves."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from llm_datadist import LLMException, LLMStatusCode
from llm_datadist._core import limits
from llm_datadist.devices.pool_memory import available_nbytes
from llm_datadist.testing.stopwatch import Stopwatch
from tests.support import actors, allocated
from tests.support.memory import FILL, PAGE
from tests.support.pair import AT_ONCE, P_ID, SEED, SUCCESS, Combo, Pair, Shape, by_id, make_pair, of_model
from tests.support.pool import Spawner
from tests.support.seccomp import peer_without
from tests.support.world import World, wait_until

FAILED = LLMStatusCode.LLM_LINK_FAILED
GONE = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
INVALID = LLMStatusCode.LLM_PARAM_INVALID
NOT_YET = LLMStatusCode.LLM_NOT_YET_LINK
MIB = 1 << 20
LARGE = Shape(tensors=4, dim0=1 << 14, stride=4096)  # 256 MiB in small blocks: copied as units
WHOLE = list(range(LARGE.dim0))
MODES = pytest.mark.parametrize("mode", ["A", "B"])
UNTOUCHED = 0x5A
ALONE: dict[str, str | None] = {"LLM_DATADIST_TESTS": "a process of its own"}


@pytest.fixture
def mode_pair(spawn: Spawner, mode: str) -> Pair:
    return make_pair(spawn, Combo(mode, "shm"))


# ---- in the middle of a pull ----------------------------------------------------------------------------------


def _pull_and_watch(w: World) -> tuple[LLMStatusCode, float, bool]:
    """How the last of some large pulls ended, when, and whether the destination is the same a moment after that."""
    code = SUCCESS
    try:
        while not w.extras.get("enough"):
            actors.pull_blocks(w, of_model(0), "dst", WHOLE, WHOLE)
    except LLMException as exc:
        code = exc.status_code
    ended, first = time.monotonic(), actors.digest(w, "dst")
    actors.pause(0.3)
    return code, ended, actors.digest(w, "dst") == first


def _mark(w: World) -> None:
    w.held["dst"].tensor(0)[0] = UNTOUCHED


def _begun(w: World) -> bool:
    first = w.held["dst"].tensor(0)
    watch = Stopwatch()
    while first[0] == UNTOUCHED:
        if not watch.within(10):
            return False
    return True


def _in_the_middle(pair: Pair, *, again: bool = False) -> Any:
    """A large pull that has moved its first byte, and more after it until one fails if ``again``."""
    pair.source(shape=LARGE)
    pair.destination(shape=LARGE)
    pair.d.call(_mark)
    running = pair.d.start(_pull_and_watch)
    assert pair.d.call(_begun)
    if not again:
        pair.d.call(actors.raise_flag, "enough")
    return running


@MODES
def test_t3_the_owner_is_killed_in_the_middle(mode_pair: Pair, spawn: Spawner) -> None:
    pair = mode_pair.up(timeout_ms=20_000)
    running = _in_the_middle(pair, again=True)
    pair.p.kill()
    watch = Stopwatch()
    code, ended_at, same = running.result()
    assert code in (FAILED, NOT_YET) and watch.within(1.0, until=ended_at)
    assert same, "something was written after the pull had failed"
    pair.p, port = spawn(), pair.address[1]
    values = actors.options(pair.combo.mode, "shm", f"127.0.0.1:{port}")
    pair.address = pair.p.call(actors.up, P_ID, values)
    pair.link()
    pair.source("again", seed=21, model_id=1)
    pair.destination("dst2")
    pair.pull_blocks([1], [2], of_model(1), "dst2").ok()
    pair.blocks_right([1], [2], "again", "dst2")


@MODES
def test_a_finalize_of_the_owner_in_the_middle(mode_pair: Pair) -> None:
    """Its pool is unmapped there while it is still mapped here."""
    pair = mode_pair.up(timeout_ms=20_000)
    running = _in_the_middle(pair)
    assert pair.p.attempt(actors.finalize).took.within(2)
    code, _, same = running.result()
    assert code in (SUCCESS, FAILED, NOT_YET)
    if code == SUCCESS:
        pair.blocks_right(WHOLE, WHOLE)
    assert same, "something was written after the pull had ended"
    late = pair.pull_blocks([1], [2])
    assert late.code in (FAILED, NOT_YET) and late.took.within(AT_ONCE)
    assert pair.d.call(actors.links) == []


def _withdraw_and_overwrite(w: World) -> None:
    actors.unregister(w, "src")
    w.held["src"].whole()[:] = 0xEE


@MODES
def test_s5_the_owner_withdraws_in_the_middle(mode_pair: Pair) -> None:
    pair = mode_pair.up(timeout_ms=20_000)
    pair.source("other", model_id=1, seed=21)
    pair.destination("small")
    running = _in_the_middle(pair)
    pair.p.call(_withdraw_and_overwrite)
    code, _, _ = running.result()
    assert code == SUCCESS if pair.combo.mode == "A" else code in (SUCCESS, GONE)
    if code == SUCCESS:
        pair.blocks_right(WHOLE, WHOLE)
    pair.pull_blocks([1], [2], of_model(1), "small").ok()
    pair.blocks_right([1], [2], "other", "small")


# ---- an owner that does not run --------------------------------------------------------------------------------


@pytest.mark.rule("R.15")
def test_t2_a_stopped_owner_is_read_in_mode_b(spawn: Spawner) -> None:
    pair = make_pair(spawn, Combo("B", "shm")).up(timeout_ms=2000, HeartbeatIntervalMs="5000")
    pair.source()
    pair.destination()
    pair.pull_blocks([1], [2]).ok()
    pair.d.call(actors.refill, "dst", None)
    pair.p.stop()
    outcome = pair.pull_blocks([3, 4], [5, 6])
    pair.p.cont()
    assert outcome.code == SUCCESS and outcome.took.within(AT_ONCE), outcome
    pair.blocks_right([3, 4], [5, 6])


def _fork_a_sleeper(w: World) -> int:
    """A child that inherits all that the engine does not take from it."""
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    return child


@MODES
def test_f1_a_forked_child_keeps_no_owner_alive(mode_pair: Pair) -> None:
    pair = mode_pair.up(timeout_ms=5000)
    pair.source()
    pair.destination()
    child = pair.p.call(_fork_a_sleeper)
    try:
        pair.pull_blocks([1], [2]).ok()
        pair.blocks_right([1], [2])
        assert wait_until(lambda: not _maps_pools(child)), "the child holds the pool"
        pair.p.kill()
        late = pair.pull_blocks([3], [4])
        assert late.code in (FAILED, NOT_YET) and late.took.within(AT_ONCE), late
    finally:
        os.kill(child, signal.SIGKILL)


def _maps_pools(pid: int) -> bool:
    """Whether a child still has memory of engines, or descriptors of it; it lets go at its own pace."""
    held = Path(f"/proc/{pid}/maps").read_text()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            held += os.readlink(f"/proc/{pid}/fd/{fd}")
    return "memfd:llm-datadist" in held


@MODES
def test_f1_a_forked_child_of_the_reader_reads_nothing(mode_pair: Pair) -> None:
    pair = mode_pair.up(timeout_ms=5000)
    pair.source()
    pair.destination()
    pair.pull_blocks([1], [2]).ok()
    child = pair.d.call(_fork_a_sleeper)
    try:
        assert wait_until(lambda: not _maps_pools(child)), "the child has the peer's memory"
        pair.pull_blocks([3], [4]).ok()
        pair.blocks_right([1, 3], [2, 4])
    finally:
        os.kill(child, signal.SIGKILL)


# ---- where it copies to ----------------------------------------------------------------------------------------


def _spoil(w: World, name: str, how: str) -> None:
    """Makes the last page of the destination one that cannot be written."""
    held = w.held[name]
    last = held.mapping.address + held.mapping.nbytes - PAGE
    libc, page = ctypes.CDLL(None), ctypes.c_void_p(last)
    done = libc.mprotect(page, PAGE, mmap.PROT_READ) if how == "read-only" else libc.munmap(page, PAGE)
    assert done == 0


SIZES = {"small": Shape(tensors=1, dim0=8, stride=4096), "large": Shape(tensors=1, dim0=6144, stride=4096)}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("how", ["read-only", "unmapped"])
@pytest.mark.parametrize(
    ("mode", "kernel"),
    [
        pytest.param(mode, kernel, marks=[] if (mode == "B") == (kernel == "may") else [pytest.mark.slow])
        for mode in "AB"
        for kernel in ("may", "may not")
    ],
)
def test_a_destination_that_cannot_be_written(
    spawn: Spawner, mode: str, kernel: str, how: str, size: str
) -> None:
    """Whether the kernel can copy for us or not (a seccomp profile), it is an error and never a signal."""
    d = spawn() if kernel == "may" else peer_without(spawn, "process_vm_readv", errno.EPERM)
    pair = Pair(spawn(), d, Combo(mode, "shm")).up(timeout_ms=20_000)
    shape = SIZES[size]
    last = shape.dim0 - 1
    pair.source(shape=shape)
    pair.destination(shape=shape, own=True, gap=0)
    pair.d.call(_spoil, "dst", how)
    every = list(range(shape.dim0))
    pair.pull_blocks(every, every).expect(INVALID, "cannot be written")
    pair.pull_blocks([0], [last]).expect(INVALID, "cannot be written")
    pair.pull_blocks([5, 3], [1, 2]).ok()
    pair.destination("whole", shape=shape, own=True)
    pair.pull_blocks(every, every, name="whole").ok()
    pair.blocks_right(every, every, name="whole")


# ---- beside other ways -----------------------------------------------------------------------------------------


def _two_sources(pair: Pair) -> None:
    """One in P's pool and one that is not."""
    pair.p.call(allocated.blocks, "pooled", model_id=0, seed=SEED)
    pair.sources["pooled"] = (Shape(), SEED)
    pair.source("plain", seed=21, model_id=1)
    pair.destination()


def _both_are_read(pair: Pair) -> None:
    for model_id, name in enumerate(("pooled", "plain")):
        pair.d.call(actors.refill, "dst", None)
        pair.pull_blocks([1, 5], [2, 3], of_model(model_id)).ok()
        pair.blocks_right([1, 5], [2, 3], name)


def _chosen(pair: Pair) -> tuple[str, str]:
    """What D reads P by, and the reasons."""
    (found,) = pair.d.call(_transports)
    return found  # type: ignore[no-any-return]


def _transports(w: World) -> list[tuple[str, str]]:
    return [(i.transport, "; ".join(i.reasons)) for i in w.dist.links()]


POOL = {"MemPoolConfig": allocated.pool(MIB)}


@MODES
@pytest.mark.rule("R.16", "R.17", "S.14")
def test_pools_by_shm_and_the_rest_by_local(spawn: Spawner, mode: str) -> None:
    pair = make_pair(spawn, Combo(mode, "auto")).up(**POOL)
    transport, reasons = _chosen(pair)
    assert transport == "shm+local"
    assert "shm: chosen for small blocks in the peer's pools" in reasons
    assert "local: chosen for the rest" in reasons
    _two_sources(pair)
    _both_are_read(pair)


@MODES
@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS])
def test_pools_by_shm_and_the_rest_by_tcp_where_ptrace_is_refused(
    spawn: Spawner, mode: str, number: int
) -> None:
    pair = Pair(spawn(), peer_without(spawn, "process_vm_readv", number), Combo(mode, "auto")).up(**POOL)
    transport, reasons = _chosen(pair)
    assert transport == "shm+tcp"
    assert "local: process_vm_readv" in reasons and "tcp: chosen for the rest" in reasons
    _two_sources(pair)
    _both_are_read(pair)


def _refuse_readers(w: World) -> None:
    limits.READERS = 0


@MODES
def test_what_an_owner_refuses_goes_by_local(spawn: Spawner, mode: str) -> None:
    p = spawn(env=ALONE)
    p.call(_refuse_readers)
    pair = Pair(p, spawn(), Combo(mode, "auto")).up(**POOL)
    _two_sources(pair)
    _both_are_read(pair)
    transport, reasons = _chosen(pair)
    # On a busy machine the refusal may come before the proof was shown, in the handshake.
    said = "shm: not in use: the peer refused" if transport == "shm+local" else "shm: the peer refused"
    assert transport in ("shm+local", "local")
    assert f"{said}: the owner of the memory has 0 readers" in reasons


# ---- large pools -----------------------------------------------------------------------------------------------

SLOT = 2 << 30  # sparse


def _mark_last_slot(w: World) -> tuple[int, int]:
    """A cache of 6 GiB, of which a page is filled, and one that lies behind it; their ids."""
    manager = w.dist.cache_manager
    wide = manager.allocate_cache(allocated.desc_of(1, 3, SLOT))
    allocated.PoolView(wide.tensor_addrs[0], 3 * SLOT).view(2 * SLOT, PAGE)[:] = 7
    behind = manager.allocate_cache(allocated.desc_of(1, 2, PAGE))
    allocated.PoolView(behind.tensor_addrs[0], 2 * PAGE).view(PAGE, PAGE)[:] = 9
    assert behind.tensor_addrs[0] - wide.tensor_addrs[0] >= 3 * SLOT
    return wide.cache_id, behind.cache_id


@MODES
def test_offsets_beyond_32_bits(spawn: Spawner, mode: str) -> None:
    nbytes = 3 * SLOT + MIB
    if available_nbytes() < nbytes:
        pytest.skip(f"a pool of {nbytes} bytes, which stays empty, needs as much memory to be available")
    pair = make_pair(spawn, Combo(mode, "shm")).up(MemPoolConfig=allocated.pool(nbytes))
    wide, behind = pair.p.call(_mark_last_slot)
    pair.slot_destination(shape=Shape(tensors=1, dim0=4, stride=PAGE))
    pair.pull_cache(by_id(wide, 2), 1, PAGE).ok()
    pair.pull_cache(by_id(behind, 1), 3).ok()
    assert pair.d.call(_slots) == [{FILL}, {7}, {FILL}, {9}]


def _slots(w: World) -> list[set[int]]:
    return [set(part.tolist()) for part in w.held["dst"].tensor(0).reshape(4, PAGE)]
