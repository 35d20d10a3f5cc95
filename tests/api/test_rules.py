"""Every rule of the interface has a test that names it.

``tests/rules/section_N.txt`` lists the rules of section N, one a line: its number, then the rule. A test
that shows a rule carries ``@pytest.mark.rule("N.M")``.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

_TESTS = Path(__file__).parents[1]
_LINE = re.compile(r"(?P<number>[1-6]\.\d+) +(?P<text>\S.+)")


def _rules() -> list[str]:
    found = []
    for section in range(1, 7):
        for line in (_TESTS / "rules" / f"section_{section}.txt").read_text().splitlines():
            match = _LINE.fullmatch(line)
            assert match is not None, f"section_{section}.txt: {line!r} is not 'number  rule'"
            assert match["number"].startswith(f"{section}."), f"section_{section}.txt: {line!r}"
            found.append(match["number"])
    return found


def _marks() -> Iterator[tuple[str, str]]:
    """(rule, file) for every mark."""
    for path in sorted(_TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.rule":
                for argument in node.args:
                    yield ast.literal_eval(argument), path.relative_to(_TESTS).as_posix()


def test_a_rule_is_listed_once() -> None:
    assert [number for number, times in Counter(_rules()).items() if times > 1] == []


def test_every_rule_has_a_test() -> None:
    shown = {rule for rule, _ in _marks()}
    assert [number for number in _rules() if number not in shown] == []


def test_every_mark_names_a_rule() -> None:
    known = set(_rules())
    assert [mark for mark in _marks() if mark[0] not in known] == []
