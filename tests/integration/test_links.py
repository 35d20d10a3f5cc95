"""Rows L: links come up, are found again, are replaced and go."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from llm_datadist import LLMStatusCode
from tests.support import actors
from tests.support.pair import AT_ONCE, D_ID, P_ID, SEED, SUCCESS, Pair, Shape, of_model
from tests.support.pool import Spawner
from tests.support.which_combos import SHM_LATER, TWO
from tests.support.world import World, wait_until

ALREADY = LLMStatusCode.LLM_ALREADY_LINK
FAILED = LLMStatusCode.LLM_LINK_FAILED
NOT_YET = LLMStatusCode.LLM_NOT_YET_LINK


def _listed(peer: Any, *cluster_ids: int) -> bool:
    """Whether links() shows exactly these clusters, within the time a frame needs to arrive."""
    return wait_until(lambda: [i for i, _, _ in peer.call(actors.links)] == list(cluster_ids), AT_ONCE)


@pytest.mark.rule("4.15", "4.27")
def test_l4_another_engine_answers_at_the_address(pair: Pair) -> None:
    mode, backend = pair.combo.mode, pair.combo.backend
    address = pair.p.call(actors.up, 7, actors.options(mode, backend, "127.0.0.1:0"))
    pair.d.call(actors.up, D_ID, actors.options(mode, backend))
    pair.d.call(actors.watch_logs)
    outcome = pair.d.attempt(actors.link, [(5, address)])
    assert outcome.value == (FAILED, [FAILED])
    assert outcome.took.within(AT_ONCE)
    records = pair.d.call(actors.log_records, "WARNING")
    assert len(records) == 1, records
    name, _, text = records[0]
    assert name == "llm_datadist.link"
    assert "5" in text and "7" in text and f"{address[0]}:{address[1]}" in text
    assert pair.d.call(_link_error, 5) is not None
    assert _listed(pair.d) and _listed(pair.p)
    assert pair.d.call(actors.link, [(7, address)]) == (SUCCESS, [SUCCESS])
    pair.d.call(actors.check_link, 7)


def _link_error(w: World, cluster_id: int) -> str | None:
    return w.dist.link_error(cluster_id)  # type: ignore[no-any-return]


@pytest.mark.rule("4.7", "4.22", "4.23")
def test_l5_the_same_link_is_asked_for_again(pair: Pair) -> None:
    pair.up(d_listens=True)
    shape = Shape(dim0=64, stride=65536)
    pair.source(shape=shape)
    pair.destination(shape=shape)
    blocks = list(range(64))
    loop = pair.d.start(actors.pull_loop, of_model(0), "dst", blocks, blocks, "stop")
    for peer in (pair.d, pair.p):
        peer.call(actors.watch_logs)
    assert pair.d.call(actors.link, [(P_ID, pair.address)]) == (ALREADY, [ALREADY])
    back = pair.d.call(_listen_address)
    assert pair.p.call(actors.link, [(D_ID, back)]) == (SUCCESS, [SUCCESS])
    assert _listed(pair.d, P_ID) and _listed(pair.p, D_ID)
    pair.d.call(actors.raise_flag, "stop")
    count, _ = loop.result()
    assert count > 0
    pair.blocks_right(blocks, blocks)
    records = [r for peer in (pair.d, pair.p) for r in peer.call(actors.log_records)]
    assert not [r for r in records if r[1] in ("ERROR", "CRITICAL")], records
    assert len([r for r in records if r[1] == "WARNING"]) <= 1, records


def _listen_address(w: World) -> Any:
    return w.dist.listen_address


@pytest.mark.rule("4.8", "4.11")
def test_l5_the_same_cluster_twice_in_one_call(pair: Pair) -> None:
    pair.up(link=False)
    got = pair.d.call(actors.link, [(P_ID, pair.address), (P_ID, pair.address)])
    assert got == (ALREADY, [SUCCESS, ALREADY])
    assert _listed(pair.d, P_ID)


@SHM_LATER
@pytest.mark.rule("4.24")
@pytest.mark.parametrize(
    "rounds", [15, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(300)])]
)
def test_l6_both_sides_dial_at_the_same_moment(pair: Pair, rounds: int) -> None:
    if rounds == 15 and str(pair.combo) not in ("A-tcp", "B-local"):
        rounds = 5
    pair.up(d_listens=True, link=False)
    addresses = {P_ID: pair.address, D_ID: pair.d.call(_listen_address)}
    sides = [(pair.p, D_ID), (pair.d, P_ID)]
    for at, (peer, _) in enumerate(sides):
        peer.call(actors.blocks_cache, "src", seed=SEED + at, model_id=0)
        peer.call(actors.blocks_cache, "dst")
    for number in range(rounds):
        at = time.monotonic() + 0.02
        running = [
            peer.start(actors.at_instant, at, actors.link, [(other, addresses[other])])
            for peer, other in sides
        ]
        outcomes = [r.outcome() for r in running]
        assert [o.ok() for o in outcomes] == [(SUCCESS, [SUCCESS])] * 2, f"round {number}"
        assert all(o.took.within(3.0) for o in outcomes), outcomes
        for peer, other in sides:
            assert [i for i, _, _ in peer.call(actors.links)] == [other], f"round {number}"
            peer.call(actors.pull_blocks, of_model(0, other), "dst", [number % 8], [3])
        peer, other = sides[number % 2]
        assert peer.call(actors.unlink, [other]) == (SUCCESS, [SUCCESS])
        assert _listed(pair.d) and _listed(pair.p)
        if number == 0:  # threads that serve are started by the first use and stay
            pair.p.call(_note_resources)
            pair.d.call(_note_resources)
    for at, (peer, _) in enumerate(sides):
        seed = SEED + 1 - at
        last = ([(rounds - 1) % 8 * 1024], [3 * 1024], 1024)
        assert not peer.call(actors.compare, "dst", seed=seed, src_tensor_nbytes=8192, pieces=[last])
        peer.call(_resources_are_back)


def _note_resources(w: World) -> None:
    w.extras["noted"] = actors.resources(w)


def _resources_are_back(w: World) -> None:
    noted = w.extras["noted"]
    fits = wait_until(lambda: all(a <= b for a, b in zip(actors.resources(w), noted, strict=True)), 3.0)
    assert fits, f"fds, threads are {actors.resources(w)}, were {noted}"


@pytest.mark.rule("4.32", "4.94")
@TWO
@pytest.mark.parametrize("rounds", [4, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(300)])])
def test_l7_a_killed_peer_comes_back_with_other_memory(spawn: Spawner, pair: Pair, rounds: int) -> None:
    pair.up()
    pair.source(shape=Shape(tensors=1))
    pair.destination()
    pair.destination("single", Shape(tensors=1))
    pair.pull_blocks([0], [0], name="single").ok()
    for number in range(rounds):
        pair.d.call(actors.refill, "single", None)
        mode, backend = pair.combo.mode, pair.combo.backend
        again = spawn()
        pair.p.kill()
        pair.p = again
        values = actors.options(mode, backend, f"127.0.0.1:{pair.address[1]}")
        assert again.call(actors.up, P_ID, values)[1] == pair.address[1]
        again.call(actors.make, "padding", dim0=number + 1, stride=1 << 16)
        pair.source(shape=Shape(tensors=1), seed=100 + number)
        first = pair.pull_blocks([number % 8], [5], name="single")
        assert first.code in (FAILED, NOT_YET), first
        pair.unchanged("single")
        pair.link()
        pair.pull_blocks([number % 8], [5], name="single").ok()
        pair.blocks_right([number % 8], [5], name="single")


def test_l8_unlinking_what_is_gone(pair: Pair, tmp_path: Path) -> None:
    pair.up(link=False)
    pair.d.call(_note_resources)
    pair.link()
    pair.p.call(actors.finalize)
    scratch = tmp_path / "scratch"
    pair.d.call(_open_scratch, str(scratch))
    for force in (False, True, True):
        outcome = pair.d.attempt(actors.unlink, [P_ID], 1000, force)
        overall, each = outcome.ok()
        assert overall in (SUCCESS, LLMStatusCode.LLM_UNLINK_FAILED)
        assert each == [overall]
        assert outcome.took.within(1.2)
    assert _listed(pair.d)
    assert pair.d.call(_close_scratch) == 0
    pair.d.call(_resources_are_back)


def _open_scratch(w: World, path: str) -> None:
    w.extras["scratch"] = open(path, "wb+")  # noqa: SIM115 - stays open on purpose


def _close_scratch(w: World) -> int:
    file = w.extras.pop("scratch")
    with file:
        return len(file.read())
