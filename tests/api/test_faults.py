"""docs/explanation/faults.md names tests of each fault, which are there."""

from __future__ import annotations

import re
from pathlib import Path

_TESTS = Path(__file__).parents[1]
_PAGE = _TESTS.parent / "docs" / "explanation" / "faults.md"
_ROW = re.compile(r"\| G(\d+) \| \S.* \| (`.*`) \|")


def _named() -> dict[int, list[str]]:
    """Row -> files, as the page has them."""
    rows = map(_ROW.fullmatch, _PAGE.read_text().splitlines())
    return {int(row[1]): re.findall(r"`(.*?)`", row[2]) for row in rows if row}


def _found() -> set[tuple[int, str]]:
    """(Row, file) of every test that is named after a row."""
    return {
        (int(number), path.relative_to(_TESTS).as_posix())
        for path in _TESTS.rglob("test_*.py")
        for number in re.findall(r"def test_g(\d+)_", path.read_text())
    }


def test_what_a_row_names_has_tests_of_it() -> None:
    named = {(number, name) for number, names in _named().items() for name in names}
    assert named - _found() == set()


def test_every_row_that_has_tests_is_there() -> None:
    assert {number for number, _ in _found()} - _named().keys() == set()
    assert list(_named()) == list(range(1, len(_named()) + 1))
