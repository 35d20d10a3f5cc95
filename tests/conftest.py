"""Rules that hold for every test: nothing is left behind, random input is the same in every run."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.support import leaks, pool, slow_rule

settings.register_profile(
    "fixed",
    derandomize=True,
    database=None,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("fixed")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Before those with the marker are left out, and where whole files were asked for."""
    if any("::" in arg for arg in config.args) or config.getoption("lf", False):
        return
    if found := slow_rule.breaches(items):
        raise pytest.UsageError(
            "only `make test-long` would run these (tests/support/slow_rule.py): " + ", ".join(found)
        )


@pytest.fixture(scope="session", autouse=True)
def _ctrl_c_is_heard() -> Iterator[None]:
    """Also where it is ignored, as in what a script starts in the background: children inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def _leaves_nothing() -> Iterator[None]:
    before = leaks.take()
    yield
    left = leaks.differences(before)
    assert not left, f"the test left behind {left}"


@pytest.fixture
def spawn(_leaves_nothing: None) -> Iterator[pool.Spawner]:
    """Starts peer processes; afterwards each must have given everything back."""
    spawner = pool.Spawner()
    yield spawner
    left = spawner.close()
    assert not left, "; ".join(left)


@pytest.fixture(scope="session", autouse=True)
def _only_what_is_new_is_collected() -> None:
    """What is loaded by now stays for ever: not to be looked at again after every test."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _no_process_stays() -> Iterator[None]:
    before = leaks.take()
    yield
    pool.close_idle()
    assert leaks.take().children <= before.children, "processes outlive the session"
