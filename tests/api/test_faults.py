"""docs/explanation/faults.md names the tests of each fault: all of them, and no others."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

_TESTS = Path(__file__).parents[1]
_PAGE = _TESTS.parent / "docs" / "explanation" / "faults.md"
_ROW = re.compile(r"\| G(\d+) \| \S.* \| (`.*`) \|")


def _named() -> dict[int, list[str]]:
    """Row -> files, as the page has them."""
    rows = map(_ROW.fullmatch, _PAGE.read_text().splitlines())
    return {int(row[1]): re.findall(r"`(.*?)`", row[2]) for row in rows if row}


def _found() -> dict[int, list[str]]:
    """The same, as the names of the tests have them."""
    files: dict[int, set[str]] = defaultdict(set)
    for path in _TESTS.rglob("test_*.py"):
        for number in re.findall(r"def test_g(\d+)_", path.read_text()):
            files[int(number)].add(path.relative_to(_TESTS).as_posix())
    return {number: sorted(files[number]) for number in sorted(files)}


def test_every_row_names_its_tests() -> None:
    assert _named() == _found()


def test_no_row_is_left_out() -> None:
    assert list(_named()) == list(range(1, len(_named()) + 1))
