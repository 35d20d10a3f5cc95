"""Memory that goes while a peer reads it with NIXL over TCP: UCX would take the owner with it (SIGSEGV)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from llm_datadist import LLMException, LLMStatusCode
from llm_datadist.testing.stopwatch import Stopwatch, Taken
from tests.support import actors, netns
from tests.support.nixl_engines import BOTH, QUIET, NetPair, net_pair
from tests.support.nixl_pair import need_nixl
from tests.support.pair import AT_ONCE, D_ID, SUCCESS, Combo, Shape, of_model
from tests.support.peers import Running
from tests.support.pool import Spawner
from tests.support.world import World

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

GONE = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
LOST = LLMStatusCode.LLM_LINK_FAILED
LARGE = Shape(tensors=2, dim0=10, stride=1 << 20)  # 2 s
WHOLE = list(range(LARGE.dim0))
LONG_MS, SHORT_MS = 30_000, 600  # what the owner's unregister waits for those who hold a lease
MODES = pytest.mark.parametrize("combo", BOTH, ids=str)


@pytest.fixture
def spawn(_leaves_nothing: None) -> Iterator[Spawner]:
    need_nixl()
    spawner = Spawner(QUIET)
    yield spawner
    left = spawner.close()
    assert not left, "; ".join(left)


def _ready(pair: NetPair, owner_ms: int) -> NetPair:
    """A large source, a destination for it, and a small pair that has been used."""
    pair.up_there(owner_ms)
    pair.source(shape=LARGE)
    pair.destination(shape=LARGE, model_id=5)
    pair.source("other", model_id=1, seed=21)
    pair.destination("small")
    pair.pull_blocks([1], [2], of_model(1), "small").ok()
    return pair


def _all_is_well(pair: NetPair) -> None:
    """The owner lives, also when what was on its way has arrived, and the link works."""
    actors.pause(0.5)
    assert pair.p.alive, "UCX has ended the owner"
    pair.d.call(actors.refill, "small", None)
    pair.pull_blocks([3], [4], of_model(1), "small").ok()
    pair.blocks_right([3], [4], "other", "small")


def _code(func: Callable[..., None], w: World, *args: Any) -> LLMStatusCode:
    try:
        func(w, *args)
    except LLMException as exc:
        return exc.status_code
    return SUCCESS


def _pull(w: World) -> LLMStatusCode:
    return _code(actors.pull_blocks, w, of_model(0), "dst", WHOLE, WHOLE)


def _push(w: World) -> LLMStatusCode:
    return _code(actors.push_blocks, w, of_model(5, D_ID), "src", WHOLE, WHOLE)


def _mark(w: World) -> None:
    w.held["dst"].tensor(0)[0] = 0


def _begun(w: World) -> None:
    """Returns when the first byte has arrived: the pattern's, or the mark would be there still."""
    first, watch = w.held["dst"].tensor(0), Stopwatch()
    while first[0] == 0:
        assert watch.within(20), "nothing arrives"
        time.sleep(0.001)


def _withdraw(w: World) -> Taken:
    """Unregisters and unmaps at once; how long the first took."""
    watch = Stopwatch()
    actors.unregister(w, "src")
    took = watch.took()
    actors.unmap(w, "src")
    return took


def _in_the_middle(pair: NetPair, move: Callable[[World], LLMStatusCode]) -> Running:
    pair.d.call(_mark)
    running = (pair.p if move is _push else pair.d).start(move)
    pair.d.call(_begun)
    return running


@MODES
def test_s5_a_read_that_outlasts_the_unregister_is_cut_off(spawn: Spawner, combo: Combo) -> None:
    with net_pair(spawn, combo) as pair:
        _ready(pair, SHORT_MS)
        running = _in_the_middle(pair, _pull)
        took = pair.p.call(_withdraw)
        code = running.result()
        assert pair.p.alive, "UCX has ended the owner"
        assert code == GONE
        assert took.within((SHORT_MS / 1000 if combo.mode == "A" else 0) + 1)
        _all_is_well(pair)


@MODES
def test_s5_a_lease_is_waited_for(spawn: Spawner, combo: Combo) -> None:
    with net_pair(spawn, combo) as pair:
        _ready(pair, LONG_MS)
        running = _in_the_middle(pair, _pull)
        took = pair.p.call(_withdraw)
        code = running.result()
        if combo.mode == "A":
            assert code == SUCCESS and took.elapsed > 1
            pair.blocks_right(WHOLE, WHOLE)
        else:
            assert code == GONE and took.within(1), "a read that fails in any case is not waited for"
        _all_is_well(pair)


@pytest.mark.parametrize("owner_ms", [LONG_MS, SHORT_MS])
def test_s5_a_push_ends_before_its_source_goes(spawn: Spawner, owner_ms: int) -> None:
    with net_pair(spawn, BOTH[1]) as pair:
        _ready(pair, owner_ms)
        running = _in_the_middle(pair, _push)
        pair.p.call(_withdraw)
        if owner_ms == LONG_MS:
            assert running.result() == SUCCESS
            pair.blocks_right(WHOLE, WHOLE)
        else:
            assert running.result() in (GONE, LLMStatusCode.LLM_TIMEOUT)
        _all_is_well(pair)


@MODES
def test_s5_a_link_that_cannot_be_asked_is_given_time(
    spawn: Spawner, combo: Combo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unlinked with force in the middle of a read, then unregistered and unmapped."""
    monkeypatch.setattr(netns, "RATE", ("rate", "40mbit", "burst", "256kb", "latency", "400ms"))
    with net_pair(spawn, combo) as pair:
        _ready(pair, LONG_MS)
        for after in (0.2, 0.5, 0.7, 1.0):  # UCX touches the memory in bursts
            running = _in_the_middle(pair, _pull)
            actors.pause(after)
            pair.p.call(_unlink_and_withdraw)
            assert running.result() == LOST
            actors.pause(0.5)
            assert pair.p.alive, "UCX has ended the owner"
            pair.link()
            pair.source(shape=LARGE)
        _all_is_well(pair)


def _unlink_and_withdraw(w: World) -> None:
    assert actors.unlink(w, [D_ID], 3000, True)[0] == SUCCESS
    _withdraw(w)


@MODES
def test_s5_a_network_so_slow_that_the_read_must_be_cut(
    spawn: Spawner, combo: Combo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quarter MB/s: no transfer ends by itself within the linger time, so its connection is given up."""
    monkeypatch.setattr(netns, "RATE", ("rate", "2mbit", "burst", "256kb", "latency", "400ms"))
    with net_pair(spawn, combo) as pair:
        _ready(pair, SHORT_MS)
        running = _in_the_middle(pair, _pull)
        pair.p.call(_withdraw)
        assert running.result() == GONE
        _all_is_well(pair)


@MODES
def test_an_idle_link_holds_up_no_unregister(spawn: Spawner, combo: Combo) -> None:
    """Nor does a read of something else."""
    with net_pair(spawn, combo) as pair:
        _ready(pair, LONG_MS)
        pair.source("third", model_id=2)
        running = _in_the_middle(pair, _pull)
        other = pair.p.attempt(actors.unregister, "third")
        assert other.error is None and other.took.within(AT_ONCE)
        assert running.result() == SUCCESS
        pair.blocks_right(WHOLE, WHOLE)
        last = pair.p.attempt(_withdraw)
        assert last.error is None and last.took.within(AT_ONCE)
        _all_is_well(pair)
