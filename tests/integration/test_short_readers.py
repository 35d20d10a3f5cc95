"""Row G14: a reader that is out of descriptors when its peer's memory, or a data connection, comes."""

from __future__ import annotations

import contextlib
import os
import resource

import pytest

from llm_datadist import BlocksCacheKey, LLMStatusCode
from llm_datadist.testing.stopwatch import Stopwatch
from llm_datadist.transports import shm_memory
from tests.support import actors, allocated
from tests.support.pair import D_ID, P_ID, SEED, SUCCESS, Combo, Pair
from tests.support.pool import Spawner
from tests.support.world import World, wait_until

OUT = LLMStatusCode.LLM_OUT_OF_MEMORY
ALONE: dict[str, str | None] = {"LLM_DATADIST_TESTS": "a process of its own"}
MODES = pytest.mark.parametrize("mode", ["A", "B"])


def _leave_no_descriptors(w: World) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 9, hard))
    taken = w.extras["descriptors"] = contextlib.ExitStack()
    with contextlib.suppress(OSError):
        while True:
            taken.callback(os.close, os.dup(0))


def _give_descriptors_back(w: World) -> None:
    w.extras["descriptors"].close()


def _leave_answers_alone(w: World) -> None:
    """They come at once, before anybody could take the descriptors away."""
    kept, listen = w.extras.setdefault("kept", []), shm_memory.PeerMemory.listen
    w.extras["listen"] = listen
    shm_memory.PeerMemory.listen = lambda *args: kept.append(args)  # type: ignore[method-assign,assignment]


def _hear_answers(w: World) -> None:
    shm_memory.PeerMemory.listen = listen = w.extras["listen"]  # type: ignore[method-assign]
    for args in w.extras["kept"]:
        listen(*args)


def _reasons(w: World) -> str:
    (link,) = w.dist.links()
    return "; ".join((link.transport, *link.reasons))


def _comes_into_use(w: World) -> bool:
    return wait_until(lambda: "not in use" not in _reasons(w))


def _deaf(spawn: Spawner, combo: Combo) -> Pair:
    """A pair whose reader has linked, and has no descriptors left for what the owner has sent it then."""
    d = spawn(env=ALONE)
    d.call(_leave_answers_alone)
    pair = Pair(spawn(), d, combo).up(d_listens=True, MemPoolConfig=allocated.pool(1 << 20))
    if combo.backend == "shm":
        pair.source()
    else:
        pair.p.call(allocated.blocks, "src", model_id=0, seed=SEED)
    pair.destination(model_id=3)
    d.call(_leave_no_descriptors)
    d.call(_hear_answers)
    return pair


@MODES
def test_g14_a_reader_without_descriptors_is_told_so_and_reads_once_there_are_some(
    spawn: Spawner, mode: str
) -> None:
    pair = _deaf(spawn, Combo(mode, "shm"))
    for _ in range(2):
        pair.pull_blocks([1], [2]).expect(OUT, "RLIMIT_NOFILE")
        if mode == "B":
            pushed = pair.p.attempt(actors.push_blocks, BlocksCacheKey(D_ID, 3), "src", [1], [2])
            pushed.expect(OUT, "RLIMIT_NOFILE")
    pair.unchanged()
    assert "shm: not in use: " in pair.d.call(_reasons) and "RLIMIT_NOFILE" in pair.d.call(_reasons)
    pair.d.call(_give_descriptors_back)
    pair.pull_blocks([1], [2]).ok()
    pair.blocks_right([1], [2])
    assert "not in use" not in pair.d.call(_reasons)


@MODES
def test_g14_a_link_that_has_another_way_takes_shm_once_there_are_some(spawn: Spawner, mode: str) -> None:
    pair = _deaf(spawn, Combo(mode, "auto"))
    pair.pull_blocks([1], [2]).ok()
    assert pair.d.call(_reasons).startswith("shm+local") and "RLIMIT_NOFILE" in pair.d.call(_reasons)
    pair.d.call(_give_descriptors_back)
    assert pair.d.call(_comes_into_use)
    pair.pull_blocks([3], [1]).ok()


@pytest.mark.parametrize("timeout_ms", [500, 5000])
def test_g14_a_reader_that_cannot_take_a_data_connection_names_the_limit(
    spawn: Spawner, timeout_ms: int
) -> None:
    """The owner has dialled the link, so it dials what the reader asks for; the reader's listener has no room."""
    reader = spawn(env=ALONE)
    pair = Pair(reader, spawn(), Combo("B", "tcp")).up(timeout_ms=timeout_ms)
    reader.call(actors.blocks_cache, "dst", model_id=3)
    pair.d.call(actors.blocks_cache, "src", model_id=0, seed=SEED)
    reader.call(_leave_no_descriptors)
    watch = Stopwatch()
    pull = reader.attempt(actors.pull_blocks, BlocksCacheKey(D_ID, 0), "dst", [1], [2])
    pull.expect(OUT, "RLIMIT_NOFILE", "no data connection")
    assert watch.within(3.0), "none is in use that could be waited for"
    push = pair.d.attempt(actors.push_blocks, BlocksCacheKey(P_ID, 3), "src", [1], [2])
    push.expect(OUT, "RLIMIT_NOFILE", "no data connection")
    reader.call(_give_descriptors_back)
    assert reader.attempt(actors.pull_blocks, BlocksCacheKey(D_ID, 0), "dst", [1], [2]).code == SUCCESS
    pair.d.attempt(actors.push_blocks, BlocksCacheKey(P_ID, 3), "src", [1], [2]).ok()
