"""Every reason that can be given for not using a transport is forced, and read where users read it."""

from __future__ import annotations

import pytest

from tests.support import forced_answers, forced_offers, reasons
from tests.support.pool import Spawner
from tests.support.reasons import FORCED, Force, Stage

assert forced_offers and forced_answers  # they fill FORCED
CASES = [
    pytest.param(template, force, id=f"{getattr(force, '__name__', 'force')}-{at}")
    for at, (template, force) in enumerate((t, f) for t, forced in FORCED.items() for f in forced)
]


@pytest.mark.rule("4.34", "4.96")
@pytest.mark.parametrize(("template", "force"), CASES)
@pytest.mark.rule("R.20")
def test_p2_every_reason_is_told(
    template: str, force: Force, spawn: Spawner, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = force(Stage(spawn, monkeypatch))
    assert reasons.pattern(template).search(told), told


def test_every_text_in_the_source_is_forced() -> None:
    assert reasons.templates() == set(FORCED)
    assert reasons.passed_on() == reasons.PASSED_ON, "texts from elsewhere: add where they are made to MAKERS"
