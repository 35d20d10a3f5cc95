"""Rows F: forked children and worker processes beside an engine."""

from __future__ import annotations

import atexit
import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

import llm_datadist as dd
from llm_datadist.testing.stopwatch import Stopwatch
from tests.support import actors
from tests.support.pair import P_ID, Combo, Pair, make_pair, of_model
from tests.support.pool import Spawner
from tests.support.world import World

ROOT = Path(__file__).resolve().parents[2]


def _calls(w: World) -> dict[str, Any]:
    """Every public method, with arguments that would be right."""
    dist, manager = w.dist, w.dist.cache_manager
    held = w.held["dst"]
    desc, addresses, cache = held.desc, held.addresses, held.cache
    by_id = dd.CacheKeyByIdAndIndex(P_ID, 1, 0)

    class Layers(dd.LayerSynchronizer):
        def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
            return True

    keyed = dd.TransferWithCacheKeyConfig(of_model(0), range(1), range(1))
    return {
        "init": lambda: dist.init(actors.options()),
        "link_clusters": lambda: actors.link(w, [(P_ID, ("127.0.0.1", 9))]),
        "unlink_clusters": lambda: actors.unlink(w, [P_ID]),
        "check_link_status": lambda: dist.check_link_status(P_ID),
        "links": dist.links,
        "listen_address": lambda: dist.listen_address,
        "link_error": lambda: dist.link_error(P_ID),
        "cache_manager": lambda: dist.cache_manager.unregister_cache(99),
        "register_blocks_cache": lambda: manager.register_blocks_cache(desc, addresses),
        "register_cache": lambda: manager.register_cache(desc, addresses),
        "unregister_cache": lambda: manager.unregister_cache(cache.cache_id),
        "remap_registered_memory": lambda: manager.remap_registered_memory(
            dd.MemInfo(dd.Memtype.MEM_TYPE_DEVICE, addresses[0], 1)
        ),
        "allocate_cache": lambda: manager.allocate_cache(desc),
        "allocate_blocks_cache": lambda: manager.allocate_blocks_cache(desc),
        "deallocate_cache": lambda: manager.deallocate_cache(dd.Cache(99, desc, addresses)),
        "deallocate_blocks_cache": lambda: manager.deallocate_blocks_cache(cache),
        "remove_cache_key": lambda: manager.remove_cache_key(dd.CacheKey(P_ID, 1)),
        "pool_info": lambda: manager.pool_info(dd.Placement.DEVICE),
        "caches": manager.caches,
        "copy_cache": lambda: manager.copy_cache(cache, cache, 0, 1),
        "copy_blocks": lambda: manager.copy_blocks(cache, {0: [1]}),
        "swap_blocks": lambda: manager.swap_blocks(cache, cache, {}),
        "pull_blocks": lambda: manager.pull_blocks(of_model(0), cache, [0], [0]),
        "pull_cache": lambda: manager.pull_cache(by_id, cache),
        "push_blocks": lambda: manager.push_blocks(of_model(0), cache, [0], [0]),
        "push_cache": lambda: manager.push_cache(by_id, cache),
        "transfer_cache_async": lambda: manager.transfer_cache_async(cache, Layers(), [keyed]),
        "pull_blocks_async": lambda: manager.pull_blocks_async(of_model(0), cache, [0], [0]),
        "pull_cache_async": lambda: manager.pull_cache_async(by_id, cache),
        "push_blocks_async": lambda: manager.push_blocks_async(of_model(0), cache, [0], [0]),
        "push_cache_async": lambda: manager.push_cache_async(by_id, cache),
        "kv_cache_manager": lambda: dist.kv_cache_manager,
        "link": lambda: dist.link("c", {P_ID: 0, 2: 1}, "{}"),
        "unlink": lambda: dist.unlink(1),
        "query_register_mem_status": lambda: dist.query_register_mem_status(1),
        "switch_role": lambda: dist.switch_role(dd.LLMRole.PROMPT),
        "drain": lambda: dist.drain(100),
        "send_notify": lambda: dist.send_notify(P_ID, "n", b""),
        "get_notifies": dist.get_notifies,
        "finalize": dist.finalize,
    }


def _call_everything(w: World) -> dict[str, list[Any]]:
    """Method -> [class of the error, its text, whether it is a RuntimeError, whether it came at once]."""
    results = {}
    for name, call in w.extras["calls"].items():
        watch = Stopwatch()
        try:
            call()
            found: list[Any] = ["none", "", False]
        except BaseException as exc:
            found = [type(exc).__name__, str(exc), isinstance(exc, RuntimeError)]
        results[name] = [*found, watch.within(0.5)]
    return results


def _public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def _fork_and_call(w: World, end: str) -> tuple[dict[str, list[Any]], int]:
    """What every method does in a forked child that then ends in this way, and its wait status."""
    w.extras["calls"] = _calls(w)  # made here: in the child already the property cache_manager refuses
    readable, writable = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork beside threads is what is tested
        pid = os.fork()
    if pid == 0:
        _child(w, writable, end)
    os.close(writable)
    with open(readable) as pipe:
        text = pipe.read()
    _, status = os.waitpid(pid, 0)
    return json.loads(text), status


def _child(w: World, writable: int, end: str) -> None:
    try:
        os.write(writable, json.dumps(_call_everything(w)).encode())
        os.close(writable)
        if end == "exit":
            atexit._run_exitfuncs()  # what sys.exit would run
        elif end == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
    finally:
        os._exit(0)


@pytest.mark.rule("3.16", "3.19")
@pytest.mark.parametrize("end", ["exit", "_exit", "kill"])
def test_f1_the_engine_in_a_forked_child(pair: Pair, end: str) -> None:
    pair.up()
    pair.source()
    pair.destination()
    pair.pull_blocks([1], [2]).ok()
    results, status = pair.d.call(_fork_and_call, end)
    assert os.WIFSIGNALED(status) == (end == "kill")
    assert set(results) == (_public(dd.LLMDataDist) | _public(dd.CacheManager)) - {"cluster_id", "role"}
    for name, (kind, text, is_runtime_error, at_once) in results.items():
        assert is_runtime_error, (name, kind, text)
        assert "fork" in text, (name, kind, text)
        assert at_once, name
    assert [i for i, _, _ in pair.d.call(actors.links)] == [P_ID]
    assert len(pair.p.call(actors.links)) == 1
    pair.d.call(actors.refill, "dst", None)
    pair.pull_blocks([3], [4]).ok()
    pair.blocks_right([3], [4])
    pair.d.call(actors.check_link, P_ID)


def _sockets() -> set[str]:
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own
            found.add(os.readlink(f"/proc/self/fd/{fd}"))
    return {name for name in found if name.startswith("socket:")}


def _note_sockets(w: World) -> None:
    w.extras["sockets"] = _sockets()


def _sockets_of_a_child(w: World) -> tuple[int, int]:
    """How many sockets of the engine this process has, and how many a forked child of it."""
    readable, writable = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        try:
            os.write(writable, str(len(_sockets() - w.extras["sockets"])).encode())
        finally:
            os._exit(0)
    os.close(writable)
    with open(readable) as pipe:
        kept = int(pipe.read())
    os.waitpid(pid, 0)
    return len(_sockets() - w.extras["sockets"]), kept


@pytest.mark.rule("3.17")
def test_f1_a_forked_child_keeps_no_socket_of_the_engine(pair: Pair) -> None:
    for peer in (pair.p, pair.d):
        peer.call(_note_sockets)
    pair.up(d_listens=True)
    pair.source()
    pair.destination()
    pair.pull_blocks([1], [2]).ok()
    for peer in (pair.p, pair.d):
        mine, kept = peer.call(_sockets_of_a_child)
        assert mine >= 2, "a listener and the link"
        assert kept == 0
    pair.pull_blocks([3], [4]).ok()


@pytest.mark.rule("3.18")
def test_f1_a_forked_child_may_make_its_own(pair: Pair) -> None:
    pair.up()
    pair.source()
    pair.destination()
    status = pair.d.call(_fork_and_make_own, pair.combo.mode, pair.combo.backend, pair.address)
    assert os.waitstatus_to_exitcode(status) == 0
    pair.pull_blocks([3], [4]).ok()
    pair.blocks_right([3], [4])


def _fork_and_make_own(w: World, mode: str, backend: str, address: Any) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            own = World()
            actors.up(own, 50, actors.options(mode, backend))
            actors.blocks_cache(own, "dst")
            actors.link(own, [(P_ID, address)])
            actors.pull_blocks(own, of_model(0), "dst", [1], [2])
            pieces = [([1024], [2048], 1024)]
            text = actors.compare(own, "dst", seed=11, src_tensor_nbytes=8192, pieces=pieces)
            own.dist.finalize()
            code = 0 if not text else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    return status


# ---- F2: run as a program of its own, because multiprocessing leaves its servers in the process -------


def _worker(mode: str, address: Any, cluster_id: int) -> str:
    w = World()
    actors.up(w, cluster_id, actors.options(mode))
    actors.blocks_cache(w, "dst")
    actors.link(w, [(P_ID, address)])
    actors.pull_blocks(w, of_model(0), "dst", [1], [2])
    text = actors.compare(w, "dst", seed=11, src_tensor_nbytes=8192, pieces=[([1024], [2048], 1024)])
    w.release()
    return text


def _square(number: int) -> int:
    return number * number


def _beside(mode: str, host: str, port: str) -> None:
    """An engine here, engines in workers, and a fork-based pool that never touches the library."""
    address = (host, int(port))
    w = World()
    actors.up(w, 2, actors.options(mode))
    actors.blocks_cache(w, "dst")
    actors.link(w, [(P_ID, address)])
    for at, method in enumerate(("spawn", "forkserver")):
        with multiprocessing.get_context(method).Pool(2) as pool:
            texts = pool.starmap(_worker, [(mode, address, 10 + 10 * at + n) for n in range(2)], 1)
        assert texts == ["", ""], texts
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with multiprocessing.get_context("fork").Pool(4) as pool:
            assert pool.map(_square, range(20)) == [n * n for n in range(20)]
    actors.pull_blocks(w, of_model(0), "dst", [1], [2])
    assert not actors.compare(w, "dst", seed=11, src_tensor_nbytes=8192, pieces=[([1024], [2048], 1024)])
    w.release()


@pytest.mark.parametrize("mode", ["A", "B"])
def test_f2_worker_processes_beside_the_engine(spawn: Spawner, mode: str) -> None:
    pair = make_pair(spawn, Combo(mode, "auto")).up(link=False)
    pair.source()
    command = [sys.executable, "-m", "tests.integration.test_forks", mode, *map(str, pair.address)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=50, env=environment, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    _beside(*sys.argv[1:])
