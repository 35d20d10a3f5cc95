"""What may run in ``make test-long`` only: more of what ``make test`` runs too, never the only test of something."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

# A module, or module::function, and why ``make test`` has nothing of it.
ONLY_LONG = {
    "test_nixl": "needs NIXL, 69 MB",
    "test_nixl_again": "needs NIXL",
    "test_nixl_demo": "needs NIXL",
    "test_nixl_engine": "needs NIXL",
    "test_nixl_opening": "needs NIXL",
    "test_nixl_owner": "needs NIXL",
    "test_nixl_rules": "needs NIXL",
    "test_packaging::test_p1_the_wheel_works_in_every_environment": "makes an environment for every Python",
    "test_benchmarks::test_every_row_runs": "a minute; the table and a few rows run in `make test`",
    "test_examples::test_demo_with_the_real_model_in_every_way": "a minute; one way runs in `make test`",
    "test_timeouts::test_t4_a_short_timeout_on_one_host": "4 GiB; conformance has the same with less memory",
}


def breaches(items: Iterable[pytest.Item]) -> list[str]:
    """Functions, all tests of which are slow without a reason; a suite is one for all of its classes."""
    quick: dict[str, bool] = {}
    for item in items:
        name = f"{item.path.stem}::{getattr(item, 'originalname', item.name)}"
        quick[name] = quick.get(name, False) or item.get_closest_marker("slow") is None
    return [
        name
        for name, runs in quick.items()
        if not runs and name not in ONLY_LONG and name.split("::")[0] not in ONLY_LONG
    ]
