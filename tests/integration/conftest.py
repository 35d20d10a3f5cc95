"""The usual set-up of an integration test."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest

from tests.support.interrupted import INTERRUPTED, Two
from tests.support.pair import COMBOS, MODE_A, MODE_B, Combo, Pair, make_pair
from tests.support.pool import Spawner
from tests.support.short_pair import ShortPair, hurry, one_at_a_time
from tests.support.which_combos import TWO_COMBOS

# Where pool memory plays no part: there it is for `make test-long`.
CONTROL_PLANE = {
    "test_addresses", "test_background", "test_callbacks", "test_comms", "test_draining", "test_endings", "test_errors",
    "test_link_rules", "test_link_table", "test_links", "test_many_keys", "test_modes", "test_notifications",
    "test_unlinking",
}  # fmt: skip


@pytest.hookimpl(tryfirst=True)  # before those with the marker are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.stem in CONTROL_PLANE and re.search(r"\b[AB]-shm\b", item.name):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(params=COMBOS, ids=str)
def combo(request: pytest.FixtureRequest) -> Combo:
    """Both modes on both transports."""
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(params=MODE_B, ids=str)
def combo_b(request: pytest.FixtureRequest) -> Combo:
    """Mode B on both transports (pushes)."""
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(params=MODE_A, ids=str)
def combo_a(request: pytest.FixtureRequest) -> Combo:
    """Mode A on both transports."""
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def pair(spawn: Spawner, combo: Combo) -> Pair:
    """P and D, not initialised yet."""
    return make_pair(spawn, combo)


@pytest.fixture(params=TWO_COMBOS, ids=str)
def pair_of_two(spawn: Spawner, request: pytest.FixtureRequest) -> Pair:
    """For long tests: two combinations, the other two behind the marker ``slow``."""
    return make_pair(spawn, request.param)


@pytest.fixture
def pair_a(spawn: Spawner, combo_a: Combo) -> Pair:
    return make_pair(spawn, combo_a)


@pytest.fixture
def pair_b(spawn: Spawner, combo_b: Combo) -> Pair:
    return make_pair(spawn, combo_b)


@pytest.fixture
def pair_of(spawn: Spawner) -> Callable[[str, str], Pair]:
    """P and D of one given mode and transport."""
    return lambda mode, backend: make_pair(spawn, Combo(mode, backend))


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is waited for while something is short happens sooner."""
    hurry(monkeypatch)


@pytest.fixture
def short_pairs(hurried: None) -> Iterator[Callable[..., ShortPair]]:
    """Makes two engines of this process, of a mode and a transport; each call ends those before."""
    with one_at_a_time() as make:
        yield make


@pytest.fixture(params=INTERRUPTED, ids=str)
def two(request: pytest.FixtureRequest) -> Iterator[Two]:
    """Both sides in this process, for calls that are interrupted."""
    with Two(request.param) as two:
        yield two
