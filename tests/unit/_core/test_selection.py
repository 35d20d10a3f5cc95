"""Which transport is chosen, and the reasons that people read."""

from __future__ import annotations

import pytest

from llm_datadist._core.selection import PREFERENCE, candidates, choose

ALL = {name: b"" for name in PREFERENCE}
MINE = ("tcp", "local")


def test_the_best_that_both_have_in_the_order_of_preference() -> None:
    assert candidates(MINE, "auto", "auto") == ("local", "tcp")
    choice = choose(MINE, ALL, "auto", "auto", {})
    assert choice.name == "local"
    assert choice.reasons == ("local: chosen, first in the order of preference that works",)


def test_each_one_that_was_passed_over_has_its_reason() -> None:
    choice = choose(MINE, ALL, "auto", "auto", {"local": "ptrace is refused"})
    assert choice.name == "tcp"
    assert choice.reasons[0] == "local: ptrace is refused"
    assert choice.reasons[1].startswith("tcp: chosen")
    choice = choose(MINE, {"tcp": b""}, "auto", "auto", {})
    assert (choice.name, choice.reasons[0]) == ("tcp", "local: the peer does not offer it")


@pytest.mark.parametrize(("backend", "peer"), [("tcp", "auto"), ("auto", "tcp"), ("tcp", "tcp")])
def test_a_forced_one_is_the_only_one(backend: str, peer: str) -> None:
    assert candidates(MINE, backend, peer) == ("tcp",)
    choice = choose(MINE, ALL, backend, peer, {})
    assert choice.name == "tcp"
    assert choice.reasons == ("tcp: chosen, forced by transfer_backend='tcp'",)
    refused = choose(MINE, ALL, backend, peer, {"tcp": "no route"})
    assert (refused.name, refused.reasons) == ("", ("tcp: no route",))


def test_two_that_force_different_ones_have_none() -> None:
    choice = choose(MINE, ALL, "tcp", "local", {})
    assert choice.name == ""
    assert "'tcp' here and 'local' at the peer" in choice.reasons[0]


@pytest.mark.parametrize(("backend", "peer"), [("shm", "auto"), ("auto", "shm")])
def test_a_forced_one_that_is_not_here_is_named(backend: str, peer: str) -> None:
    choice = choose(MINE, ALL, backend, peer, {})
    assert choice.name == ""
    assert "'shm'" in choice.reasons[0]
