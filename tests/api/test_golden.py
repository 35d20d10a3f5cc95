"""Contract 1: the interface is what it was.

Callers depend on every line of ``golden.txt``. When a change is meant: hold the difference against the contract,
then ``python -m tests.api.golden`` (in an environment as ``make test`` makes it) writes the file anew.
"""

from __future__ import annotations

import difflib
import inspect

import pytest

import llm_datadist
from tests.api import golden


@pytest.mark.rule("5.34", "5.52", "5.69", "5.78", "5.83", "6.1", "6.34", "6.76")
def test_the_interface_is_what_it_was() -> None:
    was, now = golden.FILE.read_text().splitlines(), golden.describe().splitlines()
    difference = "\n".join(difflib.unified_diff(was, now, "golden.txt", "now", lineterm="", n=1))
    assert not difference, f"{difference}\n(if it is meant: python -m tests.api.golden)"


def test_a_changed_default_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    signature = inspect.signature(llm_datadist.LLMDataDist.link_clusters)
    changed = signature.replace(
        parameters=[p.replace(default=1) if p.name == "timeout" else p for p in signature.parameters.values()]
    )
    monkeypatch.setattr(llm_datadist.LLMDataDist.link_clusters, "__signature__", changed, raising=False)
    assert golden.describe() != golden.FILE.read_text()


@pytest.mark.parametrize("name", sorted(llm_datadist.__all__))
def test_every_public_method_says_what_it_does(name: str) -> None:
    kind = getattr(llm_datadist, name)
    assert kind.__doc__
    if "Enum" in [base.__name__ for base in kind.__mro__]:
        return
    for member, value in golden.members_of(kind).items():
        assert member in golden.SPECIAL or value.__doc__, f"{name}.{member}"
