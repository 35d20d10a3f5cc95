"""Which transport is chosen, and the reasons that people read."""

from __future__ import annotations

import pytest

from llm_datadist._core.selection import PREFERENCE, candidates, choose

ALL = {name: b"" for name in PREFERENCE}
MINE = ("tcp", "local")


def test_the_best_that_both_have_in_the_order_of_preference() -> None:
    assert candidates(MINE, "auto", "auto") == ("local", "tcp")
    choice = choose(MINE, ALL, "auto", "auto", {})
    assert choice.names == ("local",)
    assert choice.reasons == ("local: chosen, first in the order of preference that works",)


def test_each_one_that_was_passed_over_has_its_reason() -> None:
    choice = choose(MINE, ALL, "auto", "auto", {"local": "ptrace is refused"})
    assert choice.names == ("tcp",)
    assert choice.reasons[0] == "local: ptrace is refused"
    assert choice.reasons[1].startswith("tcp: chosen")
    choice = choose(MINE, {"tcp": b""}, "auto", "auto", {})
    assert (choice.names, choice.reasons[0]) == (("tcp",), "local: the peer does not offer it")


@pytest.mark.parametrize(("backend", "peer"), [("tcp", "auto"), ("auto", "tcp"), ("tcp", "tcp")])
def test_a_forced_one_is_the_only_one(backend: str, peer: str) -> None:
    assert candidates(MINE, backend, peer) == ("tcp",)
    choice = choose(MINE, ALL, backend, peer, {})
    assert choice.names == ("tcp",)
    assert choice.reasons == ("tcp: chosen, forced by transfer_backend='tcp'",)
    refused = choose(MINE, ALL, backend, peer, {"tcp": "no route"})
    assert (refused.names, refused.reasons) == ((), ("tcp: no route",))


def test_two_that_force_different_ones_have_none() -> None:
    choice = choose(MINE, ALL, "tcp", "local", {})
    assert choice.names == ()
    assert "'tcp' here and 'local' at the peer" in choice.reasons[0]


@pytest.mark.parametrize(("backend", "peer"), [("shm", "auto"), ("auto", "shm")])
def test_a_forced_one_that_is_not_here_is_named(backend: str, peer: str) -> None:
    choice = choose(MINE, ALL, backend, peer, {})
    assert choice.names == ()
    assert "'shm'" in choice.reasons[0]


def test_after_a_partial_one_comes_the_next_for_the_rest() -> None:
    choice = choose(PREFERENCE, ALL, "auto", "auto", {}, {"shm", "nixl"})
    assert choice.names == ("shm", "local")
    assert choice.reasons == (
        "shm: chosen for small blocks in the peer's pools",
        "local: chosen for the rest",
    )
    choice = choose(PREFERENCE, ALL, "auto", "auto", {"local": "refused"}, {"shm", "nixl"})
    assert choice.names == ("shm", "nixl", "tcp")
    forced = choose(PREFERENCE, ALL, "shm", "auto", {}, {"shm", "nixl"})
    assert forced.names == ("shm",)


def test_one_that_is_missing_here_says_so_whatever_the_peer_offers() -> None:
    choice = choose(PREFERENCE, {"tcp": b""}, "auto", "auto", {"nixl": "not installed"}, {"shm", "nixl"})
    assert choice.reasons[:3] == (
        "shm: the peer shares no memory: it has no pool, or its system does not let it",
        "local: the peer does not offer it",
        "nixl: not installed",
    )
