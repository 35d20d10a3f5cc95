"""Rows T: time-outs, and peers that stop, die or never answer."""

from __future__ import annotations

import time
from typing import Any

import pytest

from llm_datadist import LLMException, LLMStatusCode
from llm_datadist.testing.stopwatch import Stopwatch, Taken
from tests.support import actors
from tests.support.memory import FILL
from tests.support.pair import (
    AT_ONCE,
    D_ID,
    P_ID,
    SUCCESS,
    Combo,
    Pair,
    Shape,
    by_id,
    make_pair,
    of_model,
)
from tests.support.pool import Spawner
from tests.support.slow import SlowPair, slow_pair
from tests.support.sockets import silent_peer, swallowing_address
from tests.support.which_combos import TWO
from tests.support.world import World, wait_until

TIMEOUT = LLMStatusCode.LLM_TIMEOUT
WAIT_TIMEOUT = LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT
FAILED = LLMStatusCode.LLM_LINK_FAILED
NOT_YET = LLMStatusCode.LLM_NOT_YET_LINK
MIB = 1 << 20


@pytest.mark.rule("4.9", "4.30")
@TWO
def test_t1_addresses_that_never_answer(spawn: Spawner, pair: Pair) -> None:
    pair.up()
    pair.source()
    pair.destination()
    healthy = spawn()
    values = actors.options(pair.combo.mode, pair.combo.backend, "127.0.0.1:0")
    address = healthy.call(actors.up, 3, values)
    pair.pull_blocks([0], [0]).ok()
    before = pair.d.call(actors.resources)
    loop = pair.d.start(actors.pull_loop, of_model(0), "dst", [0], [0], "stop")
    with swallowing_address() as swallowing, silent_peer() as silent:
        remotes = [(3, address), (4, swallowing), (5, silent)]
        outcome = pair.d.attempt(actors.link, remotes, 1000)
        assert outcome.value == (TIMEOUT, [SUCCESS, TIMEOUT, TIMEOUT])
        assert outcome.took.about(1.0)
        pair.d.call(actors.raise_flag, "stop")
    pulls = loop.outcome()
    count, longest = pulls.ok()
    assert count > 0 and Taken(longest, pulls.took.stalled).within(AT_ONCE)
    assert pair.d.call(actors.unlink, [3]) == (SUCCESS, [SUCCESS])
    assert wait_until(lambda: pair.d.call(actors.resources) <= before), pair.d.call(actors.resources)


@pytest.mark.rule("3.27", "4.89", "5.119", "5.122", "5.124", "5.129")
def test_t2_a_stopped_owner_lets_the_call_time_out(pair_a: Pair) -> None:
    pair = pair_a.up(timeout_ms=1000, HeartbeatIntervalMs="5000")
    pair.source()
    pair.destination()
    pair.p.stop()
    outcome = pair.pull_blocks([1], [2]).expect(WAIT_TIMEOUT, P_ID, "ms")
    assert outcome.took.about(1.0)
    pair.unchanged()
    pair.p.cont()
    pair.pull_blocks([1], [2]).ok()
    pair.blocks_right([1], [2])


@pytest.mark.rule("5.119", "5.122", "5.124", "5.129")
def test_a_stopped_owner_lets_a_pull_over_tcp_time_out_in_mode_b(spawn: Spawner) -> None:
    """Nobody is asked for a known key, but over tcp the owner serves the bytes."""
    pair = make_pair(spawn, Combo("B", "tcp")).up(timeout_ms=1000, HeartbeatIntervalMs="5000")
    pair.source()
    cache_id = pair.slots("slots")
    pair.destination()
    pair.slot_destination("slot")
    pair.pull_blocks([7], [7]).ok()
    pair.d.call(actors.refill, "dst", None)
    pair.p.stop()
    for outcome in (pair.pull_blocks([1], [2]), pair.pull_cache(by_id(cache_id), name="slot")):
        outcome.expect(WAIT_TIMEOUT, P_ID, "ms")
        assert outcome.took.about(1.0)
    pair.p.cont()
    pair.unchanged()
    pair.unchanged("slot")
    pair.pull_blocks([1], [2]).ok()
    pair.blocks_right([1], [2])


@pytest.mark.rule("4.86", "4.90", "4.91", "4.94")
def test_t2_a_stopped_owner_is_down_after_the_link_timeout(pair_a: Pair) -> None:
    pair = pair_a.up(timeout_ms=10_000, HeartbeatIntervalMs="500", LinkTimeoutMs="1500")
    pair.source()
    pair.destination()
    pair.p.stop()
    assert pair.pull_blocks([1], [2]).expect(FAILED, P_ID).took.within(2.4)
    assert pair.pull_blocks([1], [2]).expect(NOT_YET, P_ID).took.within(AT_ONCE)
    pair.unchanged()
    pair.p.cont()
    pair.link()
    pair.pull_blocks([1], [2]).ok()
    pair.blocks_right([1], [2])


@pytest.mark.rule("3.27", "5.119", "5.123", "5.124", "5.127", "5.129")
def test_t2_a_push_to_a_stopped_peer_never_begins(pair_b: Pair) -> None:
    pair = pair_b.up(timeout_ms=1000, HeartbeatIntervalMs="5000")
    pair.source()
    pair.destination(model_id=0)
    pair.d.stop()
    outcome = pair.p.attempt(actors.push_blocks, of_model(0, D_ID), "src", [1], [2])
    outcome.expect(TIMEOUT, D_ID)
    assert outcome.took.about(1.0)
    pair.d.cont()
    pair.unchanged()
    pair.p.call(actors.push_blocks, of_model(0, D_ID), "src", [3], [4])
    pair.blocks_right([3], [4])


BIG_SLOW = Shape(tensors=4, dim0=64, stride=MIB)  # 256 MiB: 26 s over the slow link


@pytest.mark.parametrize("mode", ["A", "B"])
@pytest.mark.parametrize("rounds", [1, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_t3_the_owner_dies_in_the_middle_over_a_slow_link(spawn: Spawner, mode: str, rounds: int) -> None:
    with slow_pair(spawn, mode) as pair:
        pair.up_slow(60_000, 60_000)
        other = pair.another("d")
        pair.d.call(actors.link, [(9, pair.listen(other, 9, "d"))])
        other.call(actors.blocks_cache, "src", seed=5, model_id=0)
        pair.destination(shape=BIG_SLOW)
        pair.destination("small")
        _ = [_kill_during_a_pull(pair, lambda: pair.another("p"), 0.5, BIG_SLOW) for _ in range(rounds)]


SAME_HOST_SMALL = Shape(tensors=16, dim0=32, stride=MIB)  # 512 MiB
SAME_HOST = Shape(tensors=16, dim0=128, stride=MIB)  # 16 x 128 MiB


@pytest.mark.rule("4.90", "4.92")
@pytest.mark.parametrize(
    ("shape", "rounds"),
    [
        (SAME_HOST_SMALL, 1),
        pytest.param(SAME_HOST, 20, marks=[pytest.mark.slow, pytest.mark.timeout(600)]),
    ],
    ids=["small", "large"],
)
def test_t3_the_owner_dies_in_the_middle_on_one_host(
    spawn: Spawner, pair: Pair, shape: Shape, rounds: int
) -> None:
    pair.up(timeout_ms=60_000)
    other = spawn()
    values = actors.options(pair.combo.mode, pair.combo.backend, "127.0.0.1:0")
    pair.d.call(actors.link, [(9, other.call(actors.up, 9, values))])
    other.call(actors.blocks_cache, "src", seed=5, model_id=0)
    pair.destination(shape=shape)
    pair.destination("small")
    for _ in range(rounds):
        _kill_during_a_pull(pair, spawn, 0.0, shape)


def _kill_during_a_pull(pair: Pair, fresh: Any, after: float, shape: Shape) -> None:
    """One round of T3, with a new P at the end."""
    pair.p.call(actors.blocks_cache, "src", model_id=0, **shape.memory())
    blocks = list(range(shape.dim0))
    pair.d.call(_mark_first_byte, "dst")
    running = pair.d.start(_pull_until_it_fails, blocks)
    assert pair.d.call(_first_byte_arrived, "dst")
    side = pair.d.start(actors.pull_blocks, of_model(0, 9), "small", [1], [2])
    actors.pause(after)
    watch = Stopwatch()
    pair.p.kill()
    if pair.combo.backend == "shm":
        # The system closes the owner's connections when it has taken its memory down, just before its end.
        watch = Stopwatch()
    code, ended_at = running.result()
    side.result()
    assert code in (FAILED, NOT_YET)
    assert watch.within(AT_ONCE, until=ended_at)
    assert not pair.d.call(
        actors.compare, "small", seed=5, src_tensor_nbytes=8192, pieces=[([1024], [2048], 1024)]
    )
    pair.p = fresh()
    if isinstance(pair, SlowPair):
        pair.address = pair.listen(pair.p, P_ID, "p")
    else:
        values = actors.options(pair.combo.mode, pair.combo.backend, "127.0.0.1:0")
        pair.address = pair.p.call(actors.up, P_ID, values)
    pair.link()
    pair.source("new", model_id=7, seed=21)
    pair.d.call(actors.refill, "small", None)
    pair.pull_blocks([3], [4], of_model(7), "small").ok()
    pair.blocks_right([3], [4], source="new", name="small")
    pair.d.call(actors.refill, "small", None)


UNTOUCHED = 0x5A  # in neither the source nor the rest of the destination, which are 0xA5


def _mark_first_byte(w: World, name: str) -> None:
    w.held[name].whole()[w.held[name].starts[0]] = UNTOUCHED


def _first_byte_arrived(w: World, name: str) -> bool:
    first = w.held[name].starts[0]
    memory = w.held[name].whole()
    return actors.wait_until(lambda: memory[first] != UNTOUCHED)


def _pull_until_it_fails(w: World, blocks: list[int]) -> tuple[LLMStatusCode, float]:
    """Again and again: on a busy machine one may be over before anybody hears that it has begun."""
    while True:
        try:
            actors.pull_blocks(w, of_model(0), "dst", blocks, blocks)
        except LLMException as exc:
            return exc.status_code, time.monotonic()


LATE = Shape(tensors=2, dim0=8192, stride=4096)  # 64 MiB
EVEN = list(range(0, LATE.dim0, 2))  # the others, and what is around the tensors, stay untouched


@pytest.mark.parametrize("mode", ["A", "B"])
@pytest.mark.rule("5.122", "5.125", "5.128", "5.129")
def test_t4_nothing_arrives_after_a_pull_was_told_it_failed(spawn: Spawner, mode: str) -> None:
    with slow_pair(spawn, mode) as pair:
        pair.up_slow(30_000, 500)
        pair.source(shape=LATE)
        pair.destination(shape=LATE)
        code, took, at_error, later = pair.d.call(_pull_and_hash, EVEN)
        assert code == WAIT_TIMEOUT
        assert took.about(0.5)
        assert at_error == later
        assert pair.d.call(_reached_only_even_blocks)
        _one_block_still_works(pair)


def _reached_only_even_blocks(w: World) -> bool:
    held = w.held["dst"]
    whole = held.whole().copy()
    written = False
    for start in held.starts:
        blocks = whole[start : start + held.tensor_nbytes].reshape(-1, LATE.stride)
        written |= bool((blocks[::2] != FILL).any())
        blocks[::2] = FILL
    return written and bool((whole == FILL).all())


def _pull_and_hash(w: World, blocks: list[int]) -> tuple[LLMStatusCode, Taken, str, str]:
    """The code, the time, and the destination's hash at once and 2 s later."""
    watch, code = Stopwatch(), SUCCESS
    try:
        actors.pull_blocks(w, of_model(0), "dst", blocks, blocks)
    except LLMException as exc:
        code = exc.status_code
    took = watch.took()
    first = actors.digest(w, "dst")
    actors.pause(2.0)
    return code, took, first, actors.digest(w, "dst")


def _one_block_still_works(pair: Pair) -> None:
    pair.d.call(actors.refill, "dst", None)
    pair.pull_blocks([5], [6]).ok()
    pair.blocks_right([5], [6])


@pytest.mark.rule("5.123", "5.126", "5.128", "5.129")
def test_t4_nothing_arrives_after_a_push_was_told_it_failed(spawn: Spawner) -> None:
    with slow_pair(spawn, "B") as pair:
        pair.up_slow(500, 30_000)
        pair.source(shape=LATE)
        pair.destination(shape=LATE, model_id=0)
        outcome = pair.p.attempt(actors.push_blocks, of_model(0, D_ID), "src", EVEN, EVEN)
        outcome.expect(TIMEOUT, D_ID)
        assert outcome.took.about(0.5)
        actors.pause(0.5)
        first = pair.d.call(actors.digest, "dst")
        actors.pause(1.5)
        assert pair.d.call(actors.digest, "dst") == first
        assert pair.d.call(_reached_only_even_blocks)
        pair.d.call(actors.refill, "dst", None)
        pair.p.call(actors.push_blocks, of_model(0, D_ID), "src", [5], [6])
        pair.blocks_right([5], [6])


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", ["A", "B"])
@pytest.mark.parametrize("backend", ["local", "tcp", "shm"])
def test_t4_a_short_timeout_on_one_host(spawn: Spawner, mode: str, backend: str) -> None:
    pair = make_pair(spawn, Combo(mode, backend)).up(timeout_ms=50)
    pair.source(shape=SAME_HOST)
    pair.destination(shape=SAME_HOST)
    code, took, at_error, later = pair.d.call(_pull_and_hash, list(range(SAME_HOST.dim0)), timeout=120)
    assert at_error == later
    if code == SUCCESS:
        blocks = list(range(SAME_HOST.dim0))
        pair.blocks_right(blocks, blocks, timeout=120)
    else:
        assert code == WAIT_TIMEOUT
        assert took.within(0.2)
    _one_block_still_works(pair)


@pytest.mark.parametrize(
    ("mode", "mib", "link_timeout"),
    [
        ("A", 25, "1500"),
        pytest.param("A", 80, "30000", marks=pytest.mark.slow),
        pytest.param("B", 80, "1500", marks=pytest.mark.slow),
    ],
)
def test_t5_a_busy_link_is_not_taken_for_dead(spawn: Spawner, mode: str, mib: int, link_timeout: str) -> None:
    with slow_pair(spawn, mode) as pair:
        pair.up_slow(HeartbeatIntervalMs="500", LinkTimeoutMs=link_timeout)
        shape = Shape(tensors=1, dim0=mib, stride=MIB)
        pair.source(shape=shape)
        pair.destination(shape=shape)
        blocks = list(range(mib))
        outcome = pair.pull_blocks(blocks, blocks)
        outcome.ok()
        assert outcome.elapsed >= mib / 10 * 0.8, "the link was not slow"
        pair.blocks_right(blocks, blocks)
        assert [i for i, _, _ in pair.d.call(actors.links)] == [P_ID]


def test_a_key_that_is_not_there_yet_works_when_it_is(pair: Pair) -> None:
    pair.up()
    pair.source("other", model_id=1)
    pair.destination()
    pair.pull_blocks([0], [0], of_model(4)).expect(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, 4)
    pair.pull_blocks([1], [1], of_model(1)).ok()
    pair.source("late", model_id=4, seed=30)
    pair.d.call(actors.refill, "dst", None)
    pair.pull_blocks([2], [3], of_model(4)).ok()
    pair.blocks_right([2], [3], source="late")
