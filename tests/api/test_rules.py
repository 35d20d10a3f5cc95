"""Every rule of the interface, and every promise of README.md and SECURITY.md, has a test that names it.

``tests/rules/section_N.txt`` lists the rules of section N, one a line: its number, then the rule.
``readme.txt`` and ``security.txt`` list the sentences of those pages, as they stand there: with a number
(R.1, S.1; any that is free) what promises something, with "-" what does not. A test that shows a rule or keeps a
promise carries ``@pytest.mark.rule("N.M")``. So a promise that is new or worded anew needs an entry and a test, and
one that goes takes its entry along.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.sentences import sentences

_TESTS = Path(__file__).parents[1]
_FILES = {
    **{f"section_{section}.txt": f"{section}" for section in range(1, 7)},
    "readme.txt": "R",
    "security.txt": "S",
}
_PAGES = {"readme.txt": "README.md", "security.txt": "SECURITY.md"}
_LINE = re.compile(r"(?P<number>(?P<part>[1-6RS])\.\d+|-) +(?P<text>\S.*)")


def _lines(name: str) -> list[tuple[str, str]]:
    """(number, text) of each line."""
    found = []
    for line in (_TESTS / "rules" / name).read_text().splitlines():
        match = _LINE.fullmatch(line)
        assert match is not None, f"{name}: {line!r} is not 'number  rule'"
        if match["part"] is None:
            assert name in _PAGES, f"{name}: {line!r} has no number"
        else:
            assert match["part"] == _FILES[name], f"{name}: {line!r}"
        found.append((match["number"], match["text"]))
    return found


def _rules() -> list[str]:
    return [number for name in _FILES for number, _ in _lines(name) if number != "-"]


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


@pytest.mark.parametrize("name", _PAGES)
def test_g10_a_page_says_what_is_listed_and_nothing_else(name: str) -> None:
    """If it fails: what is new to the list goes into it, with a number and a test, or "-"; what is gone goes."""
    said = sentences((_TESTS.parent / _PAGES[name]).read_text())
    listed = [text for _, text in _lines(name)]
    new, gone = [text for text in said if text not in listed], [text for text in listed if text not in said]
    assert not new and not gone, f"{name}: " + "; ".join(
        [f"not listed: {text!r}" for text in new] + [f"not said any more: {text!r}" for text in gone]
    )
