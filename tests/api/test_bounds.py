"""Tests hold on a busy machine: they bound what the code takes, and wait for states and not for times."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted([*(ROOT / "tests").rglob("*.py"), *(ROOT / "src/llm_datadist/testing").rglob("*.py")])
CLOCKS = {"monotonic", "perf_counter", "time"}
# Where a process is stopped: there all its threads are waited for.
STOPS = {"tests/support/stopping.py", "src/llm_datadist/testing/owner.py"}


def _reads_a_clock(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CLOCKS


def _is_an_age(node: ast.AST) -> bool:
    """A difference to now."""
    ages = [part for part in ast.walk(node) if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Sub)]
    return any(_reads_a_clock(inner) for age in ages for inner in ast.walk(age.left))


def _named_ages(function: ast.AST) -> set[str]:
    """What a function calls a difference to now, or a list of them."""
    names: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and _is_an_age(node.value):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "append"
            and any(map(_is_an_age, node.args))
        ):
            names |= {part.id for part in ast.walk(node.func) if isinstance(part, ast.Name)}
    return names


def _is_a_time(node: ast.AST, named: set[str]) -> bool:
    """Seconds by the clock: a difference to now, or what is named so; not how many there are."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "len":
        return False
    parts = list(ast.walk(node))
    return (
        any(isinstance(part, ast.Attribute) and part.attr == "elapsed" for part in parts)
        or any(isinstance(part, ast.Name) and part.id in named for part in parts)
        or _is_an_age(node)
    )


def _smaller_sides(node: ast.Compare) -> Iterator[ast.AST]:
    sides = [node.left, *node.comparators]
    for left, op, right in zip(sides, node.ops, sides[1:], strict=False):
        if isinstance(op, (ast.Lt, ast.LtE)):
            yield left
        elif isinstance(op, (ast.Gt, ast.GtE)):
            yield right


def upper_bounds(source: str) -> list[int]:
    """Lines of assertions that some seconds by the clock are few."""
    tree = ast.parse(source)
    found = set()
    for scope in [tree, *(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))]:
        named = _named_ages(scope) if scope is not tree else set()
        asserts = [node for node in ast.walk(scope) if isinstance(node, ast.Assert)]
        compares = [node for one in asserts for node in ast.walk(one.test) if isinstance(node, ast.Compare)]
        found |= {n.lineno for n in compares if any(_is_a_time(side, named) for side in _smaller_sides(n))}
    return sorted(found)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_g11_an_upper_bound_of_time_is_asked_of_a_stopwatch(path: Path) -> None:
    assert upper_bounds(path.read_text()) == [], (
        "Stopwatch.within leaves out what threads waited for a processor"
    )


def test_g11_a_process_is_stopped_where_all_its_threads_are_waited_for() -> None:
    stops = {str(path.relative_to(ROOT)) for path in FILES if "signal.SIGSTOP" in path.read_text()}
    assert stops - {str(Path(__file__).relative_to(ROOT))} == STOPS


def test_an_upper_bound_is_found() -> None:
    source = """
assert time.monotonic() - began < 0.5
assert 0.4 <= outcome.elapsed <= 1.2
assert 1 > time.perf_counter() - began
assert watch.elapsed >= 0.4 and watch.within(1.2)
assert wait(time.monotonic() - 1) == []
def test() -> None:
    took = time.monotonic() - began
    assert took < 0.5
    times.append(time.monotonic() - began)
    assert sorted(times)[1] < 0.5
    assert len(times) < 5 and took >= 0.4
"""
    assert upper_bounds(source) == [2, 3, 4, 9, 11]
