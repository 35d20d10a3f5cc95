"""Transport ``nixl`` under the engine: selection and its reasons, peers that die or stop, ends, threads, leaks."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from llm_datadist import LLMException, LLMStatusCode
from llm_datadist.testing.stopwatch import Stopwatch
from llm_datadist.transports import _nixl, nixl
from llm_datadist.transports.nixl_channel import NixlChannel
from tests.support import actors, allocated
from tests.support.netns import joined
from tests.support.nixl_engines import BOTH, NIXL_A, NIXL_B, OVER_TCP, QUIET, NetPair, net_pair
from tests.support.nixl_pair import need_nixl
from tests.support.pair import D_ID, P_ID, SEED, SUCCESS, Combo, Pair, Shape, by_id, make_pair, of_model
from tests.support.pool import Spawner
from tests.support.world import World, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

FAILED = LLMStatusCode.LLM_LINK_FAILED
INVALID = LLMStatusCode.LLM_PARAM_INVALID
NOT_YET = LLMStatusCode.LLM_NOT_YET_LINK
MISSING = LLMStatusCode.LLM_FEATURE_NOT_ENABLED
LARGE = Shape(tensors=4, dim0=1 << 13, stride=8192)  # 256 MiB
WHOLE = list(range(LARGE.dim0))
OWN = {"LLM_DATADIST_TESTS": "a process of its own"}
COMBOS = pytest.mark.parametrize("combo", BOTH, ids=str)
ENVIRONMENTS = pytest.mark.parametrize("env", [QUIET, {**QUIET, **OVER_TCP}], ids=["host", "tcp"])


@pytest.fixture
def spawn(_leaves_nothing: None) -> Iterator[Spawner]:
    need_nixl()
    spawner = Spawner(QUIET)
    yield spawner
    left = spawner.close()
    assert not left, "; ".join(left)


def _transports(w: World) -> list[tuple[str, tuple[str, ...]]]:
    return [(i.transport, i.reasons) for i in w.dist.links()]


def _error(w: World, cluster_id: int) -> str:
    return str(w.dist.link_error(cluster_id))


# ---- selection ------------------------------------------------------------------------------------------------


@COMBOS
def test_auto_on_one_host_takes_local(spawn: Spawner, combo: Combo) -> None:
    pair = Pair(spawn(env=OWN), spawn(env=OWN), Combo(combo.mode, "auto")).up(
        MemPoolConfig=allocated.pool(1 << 20)
    )
    for peer in (pair.p, pair.d):
        ((transport, _),) = peer.call(_transports)
        assert transport == "shm+local"
        assert not peer.call(_loaded), "NIXL is loaded where nobody needs it"


def _loaded(w: World) -> bool:
    return any(f"{package}._bindings" in sys.modules for package in _nixl._PACKAGES)


def _pretend_rdma(w: World, directory: str) -> None:
    """This host has an RDMA device, and its peers are on other hosts."""
    nixl.RDMA_DEVICES = Path(directory)


@COMBOS
@pytest.mark.rule("R.18")
def test_auto_between_hosts_with_rdma_takes_nixl(spawn: Spawner, combo: Combo, tmp_path: Any) -> None:
    """What is registered goes by NIXL; memory that is read-only, which it cannot register, by tcp."""
    (tmp_path / "mlx5_0").mkdir()
    with net_pair(spawn, Combo(combo.mode, "auto"), slow=False) as pair:
        for peer in (pair.p, pair.d):
            peer.call(_pretend_rdma, str(tmp_path))
        pair.up_there()
        ((transport, reasons),) = pair.d.call(_transports)
        assert transport == "nixl+tcp"
        assert "nixl: chosen for memory registered with NIXL" in reasons
        _read_both_kinds(pair)


def _read_both_kinds(pair: Pair) -> None:
    pair.source()
    pair.destination()
    pair.p.call(_read_only_source, 3)
    pair.sources["fixed"] = (Shape(), 3)
    for model_id, name in ((0, "src"), (1, "fixed")):
        pair.d.call(actors.refill, "dst", None)
        pair.d.call(_count_nixl)
        pair.pull_blocks([1, 5], [2, 3], of_model(model_id)).ok()
        pair.blocks_right([1, 5], [2, 3], name)
        assert pair.d.call(_nixl_reads) == (name == "src")


def _read_only_source(w: World, seed: int) -> None:
    actors.make(w, "fixed", seed=seed)
    held = w.held["fixed"].mapping
    address, nbytes = ctypes.c_void_p(held.address), held.nbytes
    assert ctypes.CDLL(None).mprotect(address, ctypes.c_size_t(nbytes), mmap.PROT_READ) == 0
    actors.blocks_cache(w, "fixed", model_id=1)


def _count_nixl(w: World) -> None:
    w.extras["reads"] = 0
    read = w.extras.setdefault("read", NixlChannel.read)

    def counted(channel: Any, plan: Any) -> Any:
        w.extras["reads"] += 1
        return read(channel, plan)

    NixlChannel.read = counted  # type: ignore[method-assign]


def _nixl_reads(w: World) -> bool:
    return bool(w.extras["reads"])


@COMBOS
def test_read_only_memory_is_refused_where_nixl_is_forced(spawn: Spawner, combo: Combo) -> None:
    pair = make_pair(spawn, combo).up()
    pair.p.call(_read_only_source, 3)
    pair.destination()
    pair.pull_blocks([1], [2], of_model(1)).expect(INVALID, "nixl", "allocate_blocks_cache", "'auto'")
    pair.unchanged()


def test_a_package_that_is_missing_fails_at_init(spawn: Spawner) -> None:
    peer = spawn(env=OWN)
    peer.call(_hide_package)
    told = peer.attempt(actors.up, P_ID, actors.options("A", "nixl"))
    told.expect(MISSING, "'nixl'", "pip install --no-deps nixl-cu12", "'auto'")


def _hide_package(w: World) -> None:
    _nixl._PACKAGES = ("nixl_nowhere",)


def test_ucx_without_a_means_fails_at_init(spawn: Spawner) -> None:
    peer = spawn(env={"UCX_TLS": "nonsense"})
    told = peer.attempt(actors.up, P_ID, actors.options("A", "nixl"))
    told.expect(MISSING, "'nixl'", "NIXL has no agent with UCX for us")


@COMBOS
def test_a_peer_that_does_not_offer_it_is_not_linked(spawn: Spawner, combo: Combo) -> None:
    pair = make_pair(spawn, combo)
    values = actors.options(combo.mode, "auto", "127.0.0.1:0")
    address = pair.p.call(actors.up, P_ID, values)
    pair.d.call(actors.up, D_ID, actors.options(combo.mode, "nixl"))
    assert pair.d.call(actors.link, [(P_ID, address)])[1] == [FAILED]
    assert "nixl" in pair.d.call(_error, P_ID)
    assert pair.d.call(actors.links) == pair.p.call(actors.links) == []


def test_two_networks_that_ucx_does_not_join(spawn: Spawner) -> None:
    """P's UCX is told to use its loopback device only."""
    with joined(slow=False) as nets:
        envs = [{"UCX_NET_DEVICES": "lo"}, {"UCX_NET_DEVICES": nets[1].device}]
        peers = [
            spawn(prefix=net.prefix, env={**OVER_TCP, **env}) for net, env in zip(nets, envs, strict=True)
        ]
        pair = NetPair(*peers, NIXL_A)
        listen = f"{nets[0].address}:0"
        address = pair.p.call(actors.up, P_ID, actors.options("A", "nixl", listen))
        pair.d.call(actors.up, D_ID, actors.options("A", "nixl"))
        outcome = pair.d.attempt(actors.link, [(P_ID, address)])
        assert outcome.ok()[1] == [FAILED] and outcome.took.within(1.5)
        text = pair.d.call(_error, P_ID)
        assert "a first read with NIXL failed: the peer cannot be reached with NIXL" in text
        assert "FaultKind" not in text


# ---- in the middle of a pull ------------------------------------------------------------------------------------


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
    w.held["dst"].tensor(0)[0] = 0


def _begun(w: World) -> None:
    first, watch = w.held["dst"].tensor(0), Stopwatch()
    while first[0] == 0:
        assert watch.within(20), "nothing arrives"


def _in_the_middle(pair: Pair, *, again: bool = False) -> Any:
    """A large pull that has moved its first byte, and more after it until one fails if ``again``."""
    pair.source(shape=LARGE)
    pair.destination(shape=LARGE)
    pair.source("other", model_id=1, seed=21)
    pair.destination("small")
    pair.d.call(_mark)
    running = pair.d.start(_pull_and_watch)
    pair.d.call(_begun)
    if not again:
        pair.d.call(actors.raise_flag, "enough")
    return running


def _small_is_right(pair: Pair) -> None:
    pair.pull_blocks([1], [2], of_model(1), "small").ok()
    pair.blocks_right([1], [2], "other", "small")


@COMBOS
@ENVIRONMENTS
def test_t3_the_owner_is_killed_in_the_middle(spawn: Spawner, combo: Combo, env: dict[str, str]) -> None:
    """And comes back with the same id and port (L7): no old handle meets it."""
    pair = Pair(spawn(env=env), spawn(env=env), combo).up(timeout_ms=20_000)
    running = _in_the_middle(pair, again=True)
    pair.p.kill()
    watch = Stopwatch()
    code, ended_at, same = running.result()
    assert code in (FAILED, NOT_YET) and watch.within(1.0, until=ended_at)
    assert same, "something was written after the pull had failed"
    for seed in (31, 32):
        pair.d.call(actors.refill, "small", None)
        pair.p.kill()
        pair.p = spawn(env=env)
        values = actors.options(combo.mode, "nixl", f"127.0.0.1:{pair.address[1]}")
        assert pair.p.call(actors.up, P_ID, values)[1] == pair.address[1]
        pair.source("other", model_id=1, seed=seed)
        late = pair.pull_blocks([1], [2], of_model(1), "small")
        assert late.code in (FAILED, NOT_YET), late
        pair.unchanged("small")
        pair.link()
        _small_is_right(pair)


@COMBOS
def test_the_owner_is_stopped_in_the_middle_and_goes_on(spawn: Spawner, combo: Combo) -> None:
    """On one host the kernel copies: a stopped owner is read all the same in mode B, once it was found."""
    pair = make_pair(spawn, combo).up(timeout_ms=3_000, HeartbeatIntervalMs="5000")
    running = _in_the_middle(pair)
    pair.p.stop()
    code, _, same = running.result()
    pair.p.cont()
    assert code in (SUCCESS, LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT)
    assert same, "something was written after the pull had ended"
    if code == SUCCESS:
        pair.blocks_right(WHOLE, WHOLE)
    _small_is_right(pair)


@COMBOS
@pytest.mark.parametrize("how", ["unlink", "finalize here", "finalize there"])
def test_ends_under_a_transfer(spawn: Spawner, combo: Combo, how: str) -> None:
    pair = make_pair(spawn, combo).up(timeout_ms=20_000)
    running = _in_the_middle(pair)
    peer = pair.p if how == "finalize there" else pair.d
    done = peer.attempt(*((actors.unlink, [P_ID], 3000, True) if how == "unlink" else (actors.finalize,)))
    assert done.error is None and done.took.within(2)
    code, ended, same = running.result()
    assert code in (SUCCESS, FAILED, LLMStatusCode.LLM_ENGINE_FINALIZED) and same
    assert ended < time.monotonic()
    if how == "unlink":
        pair.link()
        _small_is_right(pair)


# ---- all calls at once, and over again ------------------------------------------------------------------------------


@COMBOS
def test_between_two_networks(spawn: Spawner, combo: Combo) -> None:
    """Over UCX's TCP: caches registered before and after the link, slots and blocks, pulls and pushes."""
    with net_pair(spawn, combo, slow=False) as pair:
        pair.up_there()
        ((transport, _),) = pair.d.call(_transports)
        assert transport == "nixl"
        pair.source()
        slots = pair.slots("slots", seed=5)
        pair.destination(model_id=3)
        pair.slot_destination("dst slots")
        pair.pull_blocks([1, 2], [3, 4]).ok()
        pair.blocks_right([1, 2], [3, 4])
        pair.pull_cache(by_id(slots, 2), 5, name="dst slots").ok()
        pair.right([(2048, 5120, 1024)], "slots", "dst slots")
        if combo.mode == "B":
            pair.d.call(actors.refill, "dst", None)
            pair.p.call(actors.push_blocks, of_model(3, D_ID), "src", [7], [0])
            pair.blocks_right([7], [0])


@ENVIRONMENTS
def test_c3_32_threads_and_caches_that_come_and_go(spawn: Spawner, env: dict[str, str]) -> None:
    pair = Pair(spawn(env=env), spawn(env=env), NIXL_B).up(timeout_ms=20_000)
    pair.source()
    for at in range(8):
        pair.destination(f"dst{at}")
    churn = pair.p.start(_come_and_go, 60)
    with ThreadPoolExecutor(32) as pool:
        outcomes = list(
            pool.map(lambda at: pair.pull_blocks([at % 8], [at // 8 % 8], name=f"dst{at % 8}"), range(256))
        )
    churn.result()
    assert {o.code for o in outcomes} == {SUCCESS}
    for at in range(8):
        pair.blocks_right([at] * 8, list(range(8)), name=f"dst{at}")


def _come_and_go(w: World, rounds: int) -> None:
    for at in range(rounds):
        name = f"more{at % 4}"
        actors.blocks_cache(w, name, seed=1, model_id=10 + at % 4)
        if at % 4 == 3:
            for other in range(4):
                actors.unregister(w, f"more{other}")
                actors.unmap(w, f"more{other}")


@COMBOS
@ENVIRONMENTS
def test_r1_nothing_is_lost_per_link_and_per_cache(spawn: Spawner, combo: Combo, env: dict[str, str]) -> None:
    pair = Pair(spawn(env=env), spawn(env=env), combo).up(link=False)
    pair.destination()
    pair.source()
    for number in range(8):
        pair.link()
        pair.source("more", model_id=1, seed=number)
        pair.pull_blocks([1], [2]).ok()
        pair.pull_blocks([1], [2], of_model(1)).ok()
        pair.blocks_right([1], [2], "more")
        pair.d.call(actors.unlink, [P_ID])
        pair.p.call(actors.unregister, "more")
        pair.p.call(actors.unmap, "more")
        assert wait_until(lambda: pair.p.call(actors.links) == [])
        if number == 2:
            before = [peer.call(actors.resources) for peer in (pair.p, pair.d)]
    for peer, resources in zip((pair.p, pair.d), before, strict=True):
        assert wait_until(lambda p=peer, r=resources: p.call(actors.resources) <= r), (  # type: ignore[misc]
            peer.call(actors.resources),
            resources,
        )


def test_pools_on_the_host_and_the_device(spawn: Spawner) -> None:
    """A pool is registered once; caches in it need nothing more."""
    pools = {"MemPoolConfig": allocated.pool(1 << 20), "HostMemPoolConfig": allocated.pool(1 << 20)}
    pair = make_pair(spawn, NIXL_B).up(**pools)
    placements = list(itertools.product(("HOST", "DEVICE"), repeat=2))
    for at, (there, here) in enumerate(placements):
        name = f"src{at}"
        pair.p.call(allocated.blocks, name, model_id=at, seed=SEED + at, placement=there)
        pair.sources[name] = (Shape(), SEED + at)
        pair.d.call(allocated.blocks, f"dst{at}", placement=here)
        pair.pull_blocks([1, 4], [2, 3], of_model(at), f"dst{at}").ok()
        pair.blocks_right([1, 4], [2, 3], name, f"dst{at}")
