"""Rows G3 and G14 with the system's own limits: real processes that have no descriptor, or no thread, for a while."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import llm_datadist as dd
from llm_datadist import LLMException, LLMStatusCode
from llm_datadist.testing.stopwatch import Stopwatch, Taken
from tests.support import actors, notify_actors
from tests.support.pair import D_ID, P_ID, SUCCESS, Combo, Pair, Shape, of_model
from tests.support.peers import Outcome, Peer
from tests.support.pool import Spawner
from tests.support.shortage import LIMITS, descriptors_left
from tests.support.world import World, wait_until

OUT, FAILED = LLMStatusCode.LLM_OUT_OF_MEMORY, LLMStatusCode.LLM_FAILED
LINK_FAILED = LLMStatusCode.LLM_LINK_FAILED
LINKS = 100
LIMIT = 64
_DUMPABLE = 4  # PR_SET_DUMPABLE
_OWN = {"env": {"LLM_DATADIST_TESTS": "a process of its own"}}  # whose limits no later test gets


# ---- descriptors ---------------------------------------------------------------------------------------------------


def use_up(w: World, left: int) -> None:
    """From now on there are only so many descriptors left, until ``give_back``."""
    w.extras["taken"] = stack = contextlib.ExitStack()
    stack.enter_context(descriptors_left(left))


def give_back(w: World) -> None:
    w.extras.pop("taken").close()


def cpu_s(w: World) -> float:
    times = os.times()
    return times.user + times.system


@pytest.mark.parametrize("backend", ["auto", "tcp", "shm"])
@pytest.mark.parametrize("left", range(8))
def test_g14_with_few_descriptors_left(spawn: Spawner, left: int, backend: str) -> None:
    """Init, register, link and pull, each with so many left, and then with all of them."""
    pair = Pair(spawn(), spawn(), Combo("B", backend))
    pair.address = pair.p.call(actors.up, P_ID, actors.options("B", backend, "127.0.0.1:0"))
    pair.source()
    d = pair.d

    def short(*call: Any) -> Outcome:
        d.call(use_up, left)
        outcome = d.attempt(*call)
        d.call(give_back)
        if outcome.error is not None:
            assert outcome.code in (OUT, FAILED, LINK_FAILED), outcome.error
            assert re.search(LIMITS, outcome.text), outcome.error
        return outcome

    values = actors.options("B", backend, "127.0.0.1:0")
    if short(actors.up, D_ID, values).error is not None:
        d.call(actors.up, D_ID, values)
    d.call(actors.make, "dst", **Shape().memory())
    if short(actors.blocks_cache, "dst").error is not None:
        d.call(actors.blocks_cache, "dst")
    code = short(actors.link, [(P_ID, pair.address)]).value[0]
    assert code in (SUCCESS, LINK_FAILED)
    if code == LINK_FAILED:
        assert re.search(LIMITS, str(d.call(_link_error)))
    else:
        short(actors.pull_blocks, of_model(0), "dst", [1], [2])
        d.call(actors.unlink, [P_ID], 3000, True)
    pair.link()
    pair.pull_blocks([1], [2]).ok()
    short(actors.pull_blocks, of_model(0), "dst", [1], [2])
    pair.pull_blocks([1], [2]).ok()
    pair.blocks_right([1], [2])


def _link_error(w: World) -> str | None:
    return w.dist.link_error(P_ID)  # type: ignore[no-any-return]


class _Crowd:
    """Many engines of one process that link with one peer."""

    def __init__(self, count: int, backend: str) -> None:
        self.engines = [dd.LLMDataDist(dd.LLMRole.MIX, 100 + at) for at in range(count)]
        for engine in self.engines:
            engine.init(actors.options("B", backend, AllowMultipleInstances="1"))

    def each(self, call: Callable[[dd.LLMDataDist], Any], engines: list[dd.LLMDataDist]) -> list[Any]:
        with ThreadPoolExecutor(max(1, len(engines))) as pool:
            return list(pool.map(call, engines))

    def finalize(self) -> None:
        self.each(dd.LLMDataDist.finalize, self.engines)


def gather(w: World, backend: str) -> None:
    w.extras["crowd"] = _Crowd(LINKS, backend)


def _unlinked(crowd: _Crowd) -> list[dd.LLMDataDist]:
    return [engine for engine in crowd.engines if not engine.links()]


def link_all(w: World, address: Any) -> list[tuple[LLMStatusCode, str]]:
    """All that are not linked: code and reason of each."""
    crowd = w.extras["crowd"]

    def link(engine: dd.LLMDataDist) -> tuple[LLMStatusCode, str]:
        code = engine.link_clusters([actors.cluster(P_ID, address)], 5000)[0]
        return code, str(engine.link_error(P_ID))

    return crowd.each(link, _unlinked(crowd))  # type: ignore[no-any-return]


def unlink_some(w: World, count: int) -> int:
    crowd = w.extras["crowd"]
    linked = [engine for engine in crowd.engines if engine.links()][:count]
    codes = crowd.each(lambda e: e.unlink_clusters([actors.cluster(P_ID)], 3000, True)[0], linked)
    assert codes == [SUCCESS] * len(linked)
    return len(linked)


def limit_descriptors(w: World, most: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


@pytest.mark.parametrize("backend", ["auto", "tcp"])
def test_g14_a_hundred_links_under_a_limit_of_64_descriptors(spawn: Spawner, backend: str) -> None:
    p, d = spawn(**_OWN), spawn(**_OWN)
    address = p.call(actors.up, P_ID, actors.options("B", backend, "127.0.0.1:0"))
    p.call(actors.blocks_cache, "src", seed=5, model_id=0)
    d.call(gather, backend)
    p.call(limit_descriptors, LIMIT)
    told = d.call(link_all, address)
    codes = [code for code, _ in told]
    assert set(codes) == {SUCCESS, LINK_FAILED}, set(codes)
    for code, reason in told:
        assert code == SUCCESS or "RLIMIT_NOFILE" in reason, reason
    # Somebody who dials all the time finds it asleep between two looks.
    before, began = p.call(cpu_s), time.monotonic()
    again = d.call(link_all, address)
    assert {code for code, _ in again} <= {SUCCESS, LINK_FAILED}
    assert p.call(cpu_s) - before <= 0.3 * (time.monotonic() - began) + 0.2
    # What some of them give back others get.
    freed = d.call(unlink_some, 5)
    assert freed == 5
    assert SUCCESS in [code for code, _ in d.call(link_all, address)]
    p.call(limit_descriptors, 20000)
    assert {code for code, _ in d.call(link_all, address)} == {SUCCESS}
    assert len(p.call(actors.links)) == LINKS


# ---- threads -------------------------------------------------------------------------------------------------------


def become_a_user(w: World, uid: int) -> None:
    """Root may start as many threads as it likes. What is loaded stays; nothing is started."""
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    ctypes.CDLL(None).prctl(_DUMPABLE, 1, 0, 0, 0)  # else it may not look into /proc/self


@contextlib.contextmanager
def no_thread() -> Iterator[None]:
    """None can be started, also not by the harness: for as long as one call in the process lasts."""
    _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    resource.setrlimit(resource.RLIMIT_NPROC, (1, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NPROC, (hard, hard))


def init_without(w: World, values: dict[str, str]) -> tuple[LLMStatusCode, str, Taken]:
    engine = dd.LLMDataDist(dd.LLMRole.MIX, 7)
    watch = Stopwatch()
    with no_thread(), pytest.raises(LLMException) as told:
        engine.init(values)
    return told.value.status_code, str(told.value), watch.took()


def without_until_told(w: World) -> None:
    """Tells D, and waits for its word."""
    with no_thread():
        w.dist.send_notify(D_ID, "none left", b"")
        assert wait_until(lambda: bool(w.dist.get_notifies()), 20.0)


def _user(spawn: Spawner) -> Peer:
    """A process of its own, of a user who is not root, with all loaded that an engine needs."""
    peer = spawn(**_OWN)
    peer.call(actors.up, P_ID, actors.options("B", "auto", "127.0.0.1:0"))
    peer.call(actors.finalize)
    peer.call(become_a_user, 54321)
    return peer


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")


@needs_root
def test_g3_init_without_a_thread(spawn: Spawner) -> None:
    p = _user(spawn)
    before = p.call(actors.resources)
    values = actors.options("B", "auto", "127.0.0.1:0")
    for _ in range(2):
        code, text, took = p.call(init_without, values)
        assert code == OUT and took.within(0.5)
        assert (
            "RLIMIT_NPROC (ulimit -u, of all processes of the user) is 1" in text
            and "raise the limit" in text
        )
        assert p.call(actors.resources) == before
    p.call(actors.up, P_ID, values)
    p.call(actors.finalize)
    assert p.call(actors.resources) == before


@needs_root
@pytest.mark.parametrize("mode", ["A", "B"])
def test_g3_the_owner_has_no_thread_at_its_first_pull(spawn: Spawner, mode: str) -> None:
    pair = Pair(_user(spawn), spawn(), Combo(mode, "tcp")).up()
    pair.source()
    pair.destination()
    short = pair.p.start(without_until_told)
    assert pair.d.call(notify_actors.await_notifies, 1)
    for _ in range(2):
        pair.pull_blocks([1], [2]).expect(OUT, "RLIMIT_NPROC", "cluster 1 at ")
        pair.unchanged()
    pair.d.call(notify_actors.send_notify, P_ID, "go on", b"")
    short.result()
    pair.pull_blocks([1], [2]).ok()
    pair.blocks_right([1], [2])
