"""One call has one outcome, that both sides agree on; and what it holds at its peer has an owner (G1, G2, G4, G21)."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest

import llm_datadist as dd
from llm_datadist import BlocksCacheKey, CacheKey, LLMException, LLMStatusCode
from llm_datadist._core.limits import NOTIFICATIONS
from tests.support import actors, allocated, notify_actors, outcome_actors
from tests.support.engines import Engines, unlink
from tests.support.pair import D_ID, P_ID, SUCCESS, Combo, Pair, Shape, by_id, by_request, make_pair, of_model
from tests.support.pool import Spawner
from tests.support.world import wait_until

MIB = 1 << 20
POOL = {"MemPoolConfig": allocated.pool(8 * MIB, 12)}
FULL = LLMStatusCode.LLM_OUT_OF_MEMORY
GONE = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
LOST = (LLMStatusCode.LLM_LINK_FAILED, LLMStatusCode.LLM_NOT_YET_LINK)
TIMEOUTS = (LLMStatusCode.LLM_TIMEOUT, LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT)
CANCELLED = LLMStatusCode.LLM_FAILED
ROUNDS = [pytest.param(60, id="60"), pytest.param(500, id="500", marks=pytest.mark.slow)]
LATE_OR_CUT = [1, 2, 3, 4, None]  # ms that a call has; None: it is cancelled


def up(pair: Pair, ms: int | None, **more: str) -> Pair:
    """Linked, with so much time for the calls of D, or of P where it pushes."""
    values = actors.options(pair.combo.mode, pair.combo.backend, "127.0.0.1:0", ms or 5000, **more)
    pair.address = pair.p.call(actors.up, P_ID, values)
    pair.d.call(
        actors.up, D_ID, actors.options(pair.combo.mode, pair.combo.backend, None, ms or 5000, **more)
    )
    pair.link()
    return pair


def succeeded(codes: list[LLMStatusCode], ms: int | None) -> list[int]:
    """Which, by number; the others have failed for the one reason that there is."""
    allowed = {SUCCESS, CANCELLED} if ms is None else {SUCCESS, *TIMEOUTS}
    assert set(codes) <= allowed, set(codes)
    return [number for number, code in enumerate(codes) if code == SUCCESS]


def test_g1_cancelled_pulls_leave_no_lease(pair_a: Pair) -> None:
    pair = pair_a.up(timeout_ms=10_000)
    cache_id = pair.slots("slots", Shape(dim0=2), keys=[(5, 0)])
    pair.slot_destination("dst", Shape(dim0=2))
    for _ in range(20):
        codes = pair.d.call(outcome_actors.cancel_all, by_id(cache_id), "dst", 8)
        assert set(codes) <= {SUCCESS, CANCELLED}
        assert pair.p.call(outcome_actors.leases_end)
    pair.d.call(outcome_actors.cancel_all, by_id(cache_id), "dst", 8)
    assert pair.p.call(outcome_actors.unregister_in, "slots") < 0.5


def test_g1_a_grant_that_comes_after_the_cut_is_given_back(pair_a: Pair) -> None:
    pair = pair_a.up(timeout_ms=10_000, HeartbeatIntervalMs="5000")
    cache_id = pair.slots("slots", Shape(dim0=2), keys=[(5, 0)])
    pair.slot_destination("dst", Shape(dim0=2))
    pair.p.stop()
    assert set(pair.d.call(outcome_actors.cancel_all, by_id(cache_id), "dst", 8)) == {CANCELLED}
    pair.p.cont()
    assert pair.d.call(actors.check_link, P_ID) is None
    assert pair.p.call(outcome_actors.leases_end)
    assert pair.p.call(outcome_actors.unregister_in, "slots") < 0.5


@pytest.mark.parametrize("ms", LATE_OR_CUT)
@pytest.mark.parametrize("rounds", ROUNDS)
def test_g2_the_owner_has_the_notifications_of_the_pulls_that_succeeded(
    pair: Pair, ms: int | None, rounds: int
) -> None:
    up(pair, ms).source()
    pair.destination()
    keys = [of_model(0)] * rounds
    codes = pair.d.call(
        outcome_actors.calls, "pull_blocks", keys, "dst", ([1], [2]), notify=True, cancel=ms is None
    )
    assert pair.p.call(outcome_actors.numbers) == succeeded(codes, ms)


@pytest.mark.parametrize("ms", LATE_OR_CUT)
@pytest.mark.parametrize("rounds", ROUNDS)
def test_g2_g4_the_destination_has_the_notifications_of_the_pushes_that_succeeded(
    pair_b: Pair, ms: int | None, rounds: int
) -> None:
    pair = up(pair_b, ms)
    pair.source()
    pair.destination(model_id=0)
    keys = [of_model(0, D_ID)] * rounds
    codes = pair.p.call(
        outcome_actors.calls, "push_blocks", keys, "src", ([1], [2]), notify=True, cancel=ms is None
    )
    assert pair.d.call(outcome_actors.numbers) == succeeded(codes, ms)


@pytest.mark.parametrize("rounds", [pytest.param(200), pytest.param(2000, marks=pytest.mark.slow)])
def test_g2_a_push_and_its_destination_agree_while_that_drops_the_link(rounds: int) -> None:
    """Its answer may be the last that comes before the link goes, or the first that does not go out any more."""
    chance = random.Random(9)
    with Engines("B", "tcp") as engines:
        target, source = engines.make(1), engines.make(2)
        engines.blocks(target, model_id=0)
        cache, _ = engines.blocks(source)
        for number in range(rounds):
            engines.link(source, 1, target)
            pause_s = chance.uniform(0, 0.0015)
            drop = threading.Thread(target=lambda: (time.sleep(pause_s), unlink(target, 2, force=True)))  # noqa: B023
            drop.start()
            try:
                source.cache_manager.push_blocks(
                    BlocksCacheKey(1, 0), cache, [0], [0], notify=(str(number), b"")
                )
                told = [str(number)]
            except LLMException as exc:
                assert exc.status_code in LOST
                told = []
            drop.join()
            assert wait_until(lambda: not target.links(), 5)
            assert [notify.name for notify in target.get_notifies()] == told
            unlink(source, 1, force=True)


@pytest.mark.parametrize("ms", LATE_OR_CUT)
@pytest.mark.parametrize("notify", [False, True], ids=["", "notify"])
@pytest.mark.parametrize("rounds", ROUNDS)
def test_g2_a_pull_has_consumed_its_key_or_failed(
    pair_a: Pair, ms: int | None, notify: bool, rounds: int
) -> None:
    pair = up(pair_a, ms, **POOL)
    keys = [(number, 0) for number in range(rounds)]
    shape = {"tensors": 2, "stride": 256}
    pair.p.call(allocated.slots, "src", keys=keys, dim0=rounds, **shape)
    pair.d.call(allocated.slots, "dst", dim0=1, **shape)
    requests = [by_request(number) for number in range(rounds)]
    codes = pair.d.call(
        outcome_actors.calls, "pull_cache", requests, "dst", (), notify=notify, cancel=ms is None
    )
    done = succeeded(codes, ms)
    left = sorted(("req", number) for number in range(rounds) if number not in done)
    assert pair.p.call(allocated.bound_becomes, left) == left
    if notify:
        assert pair.p.call(outcome_actors.numbers) == done


def test_g2_a_full_queue_keeps_the_key(pair_a: Pair) -> None:
    pair = pair_a.up(timeout_ms=5000, **POOL)
    pair.p.call(allocated.slots, "src", keys=[(5, 0)], dim0=1)
    pair.d.call(allocated.slots, "dst", dim0=1)
    pair.d.call(notify_actors.send_many, P_ID, NOTIFICATIONS)
    pair.pull_cache(by_request(5), notify=("n", b"")).expect(FULL, P_ID, "complete", "get_notifies")
    assert pair.p.call(allocated.bound) == [("req", 5)]
    assert len(pair.p.call(notify_actors.get_notifies)) == NOTIFICATIONS
    pair.pull_cache(by_request(5), notify=("n", b"")).ok()
    assert pair.p.call(notify_actors.get_notifies) == [(D_ID, "n", b"")]
    pair.pull_cache(by_request(5)).expect(GONE)


@pytest.mark.parametrize("ms", [1, 2, 3, 4])
@pytest.mark.parametrize("rounds", ROUNDS)
def test_g4_a_push_without_time_is_late_and_nothing_else(pair_b: Pair, ms: int, rounds: int) -> None:
    pair = up(pair_b, ms)
    shape = Shape(tensors=4, dim0=64, stride=65536)  # 16 MiB: some are cut off while they move
    pair.source(shape=shape)
    pair.destination(shape=shape, model_id=0)
    blocks = list(range(64))
    codes = pair.p.call(
        outcome_actors.calls, "push_blocks", [of_model(0, D_ID)] * rounds, "src", (blocks, blocks),
        notify=False, cancel=False,
    )  # fmt: skip
    assert set(codes) <= {SUCCESS, LLMStatusCode.LLM_TIMEOUT}


class Rounds:
    """Managed mode: every round P has an allocated, deallocated cache of one request that D pulls."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.random = random.Random(9)
        self.up(P_ID)
        pair.d.call(actors.up, D_ID, actors.options("A", pair.combo.backend, None, 5000, **POOL))
        pair.link()
        pair.d.call(allocated.slots, "dst", tensors=2, dim0=1, stride=5000)

    def up(self, cluster_id: int) -> None:
        values = actors.options("A", self.pair.combo.backend, "127.0.0.1:0", 5000, **POOL)
        self.pair.address = self.pair.p.call(actors.up, cluster_id, values)

    def one(self, number: int, beside: Any, *args: Any) -> tuple[LLMStatusCode, str]:
        """What becomes of the pull while P does that."""
        self.pair.p.call(allocated.numbered, number)
        pull = self.pair.d.start(outcome_actors.pull_key, P_ID, number)
        self.pair.p.call(beside, *args, self.random.uniform(1e-6, 0.002))
        outcome: tuple[LLMStatusCode, str] = pull.result()
        return outcome

    def settled(self, number: int, code: LLMStatusCode) -> None:
        assert not (left := self.pair.p.call(outcome_actors.key_and_pages, number, code == SUCCESS)), left


@pytest.mark.parametrize("rounds", [pytest.param(60), pytest.param(400, marks=pytest.mark.slow)])
def test_g21_a_key_is_released_while_its_owner_drops_the_link(pair_a: Pair, rounds: int) -> None:
    managed, codes = Rounds(pair_a), []
    for number in range(rounds):
        code, text = managed.one(number, outcome_actors.force_unlink, D_ID)
        assert code == SUCCESS or code in LOST, text
        managed.settled(number, code)
        codes.append(code)
        pair_a.d.call(outcome_actors.force_unlink, P_ID, 0.0)
        pair_a.link()
    assert SUCCESS in codes


@pytest.mark.parametrize("rounds", [pytest.param(12), pytest.param(100, marks=pytest.mark.slow)])
def test_g21_a_key_is_released_while_its_owner_drains(pair_a: Pair, rounds: int) -> None:
    managed = Rounds(pair_a)
    for number in range(rounds):
        code, text = managed.one(number, outcome_actors.drain_after)
        assert code in (SUCCESS, LLMStatusCode.LLM_LINK_BUSY, *LOST), text
        managed.settled(number, code)
        _again(managed)


@pytest.mark.parametrize("rounds", [pytest.param(12), pytest.param(100, marks=pytest.mark.slow)])
def test_g21_a_pull_that_its_owners_end_cuts_off_has_lost_its_link(pair_a: Pair, rounds: int) -> None:
    managed = Rounds(pair_a)
    for number in range(rounds):
        code, text = managed.one(number, outcome_actors.finalize_after)
        assert code == SUCCESS or code in LOST, text
        _again(managed)


def _again(managed: Rounds) -> None:
    managed.pair.p.call(actors.finalize)
    managed.up(P_ID)
    managed.pair.d.call(outcome_actors.force_unlink, P_ID, 0.0)
    managed.pair.link()


@pytest.mark.parametrize("how", ["replaced", "killed", "left", "unlinked by the owner", "drained"])
def test_g21_the_end_of_a_link_between_the_last_answer_and_the_decision(spawn: Spawner, how: str) -> None:
    """What the owner has made ready happens; but a reader that has said goodbye has failed its calls."""
    pair = make_pair(spawn, Combo("A", "local"))
    managed = Rounds(pair)
    pair.p.call(allocated.numbered, 5)
    pair.d.call(outcome_actors.hold_decisions)
    pull = pair.d.start(outcome_actors.pull_key, P_ID, 5)
    assert pair.d.call(outcome_actors.decision_reached)
    assert pair.p.call(allocated.bound) == [("req", 5)], "nothing happens before it is decided"
    released, outcome = True, (SUCCESS,)
    match how:
        case "replaced":
            pair.d.stop()
            other = spawn()
            other.call(actors.up, D_ID, actors.options("A", "local", None, 5000, **POOL))
            assert other.call(actors.link, [(P_ID, pair.address)], 3000)[0] == SUCCESS
            pair.d.cont()
        case "killed":
            pair.d.kill()
        case "left":
            unlink = pair.d.start(outcome_actors.force_unlink, P_ID, 0.0)
            assert pair.p.call(outcome_actors.links_end)
            pair.d.call(outcome_actors.decide)
            assert unlink.result() == SUCCESS
            released, outcome = False, LOST
        case "drained":
            pair.p.attempt(outcome_actors.drain_after, 0.0, 200).expect(LLMStatusCode.LLM_LINK_BUSY)
            pair.d.call(outcome_actors.decide)
            pair.p.call(outcome_actors.drain_after, 0.0)
        case _:
            assert pair.p.call(outcome_actors.force_unlink, D_ID, 0.0) == SUCCESS
    if how not in ("killed", "drained", "left"):
        pair.d.call(outcome_actors.decide)
    if how != "killed":
        code, text = pull.result()
        assert code in outcome, text
    managed.settled(5, SUCCESS if released else outcome[0])


@pytest.mark.parametrize("backend", ["local", "tcp"])
def test_g21_a_slow_end_of_an_owner_is_the_end_of_its_link(spawn: Spawner, backend: str) -> None:
    """Its words are cleared first, and its control thread still answers while everything else ends."""
    pair = make_pair(spawn, Combo("A", backend)).up(timeout_ms=3000)
    cache_id = pair.slots("src")
    pair.slot_destination("dst")
    pair.d.call(allocated.close_gate)
    pull = pair.d.start(actors.pull_cache, by_id(cache_id), "dst")
    assert pair.d.call(allocated.gate_reached)
    pair.p.call(_clear_and_wait)
    pair.d.call(allocated.open_gate)
    outcome = pull.outcome()
    assert "register it there" not in str(outcome.error)
    outcome.expect(LLMStatusCode.LLM_LINK_FAILED, P_ID)
    pair.p.call(_go_on)


def _go_on(w: Any) -> None:
    w.dist._engine._state.closed = None


def _clear_and_wait(w: Any) -> None:
    """The first steps of finalize, held up before the others."""
    state = w.dist._engine._state
    with state.lock:
        state.closed = dd.EngineFinalizedError("the engine was finalized; call init again")
    state.slab.clear()


def test_g1_a_key_that_nobody_pulled_is_there(pair_a: Pair) -> None:
    """A pull that was cut off before its end may be made again."""
    pair = pair_a.up(timeout_ms=5000, **POOL)
    pair.p.call(allocated.slots, "src", keys=[(5, 0)], dim0=1)
    pair.d.call(allocated.slots, "dst", dim0=1)
    pair.d.call(allocated.close_gate)
    pair.d.call(notify_actors.start, "pull_cache_async", CacheKey(P_ID, 5), "dst", notify=("n", b""))
    assert pair.d.call(allocated.gate_reached)
    cancelling = pair.d.start(notify_actors.cancel)
    assert pair.d.call(notify_actors.is_cut)
    pair.d.call(allocated.open_gate)
    assert cancelling.result()[0]
    assert pair.d.call(notify_actors.finish)[0] == CANCELLED
    assert pair.p.call(outcome_actors.leases_end)
    assert pair.p.call(notify_actors.get_notifies) == []
    pair.pull_cache(by_request(5)).ok()
