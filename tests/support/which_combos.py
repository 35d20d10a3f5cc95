"""On which combinations of mode and transport a test runs, and on which only in ``make test-long``."""

from __future__ import annotations

import pytest

from tests.support.pair import COMBOS, MODE_A, Combo

# Long tests run on these two, which share neither mode nor transport, and on all four in `make test-long`.
TWO_COMBOS = [
    combo if str(combo) in ("A-tcp", "B-local") else pytest.param(combo, marks=pytest.mark.slow)
    for combo in COMBOS
]

THREE = pytest.mark.parametrize(
    "combo",
    [
        c if str(c) in ("A-tcp", "B-local", "B-shm") else pytest.param(c, marks=pytest.mark.slow)
        for c in COMBOS
    ],
    ids=str,
    indirect=True,
)
TWO = pytest.mark.parametrize("combo", TWO_COMBOS, ids=str, indirect=True)


def _shm_later(name: str, combos: list[Combo]) -> pytest.MarkDecorator:
    slow = [pytest.param(c, marks=pytest.mark.slow) if c.backend == "shm" else c for c in combos]
    return pytest.mark.parametrize(name, slow, ids=str, indirect=True)


# For long tests of what pool memory does not touch: there it is for `make test-long`. By fixture.
SHM_LATER = _shm_later("combo", COMBOS)
SHM_LATER_IN_A = _shm_later("combo_a", MODE_A)
