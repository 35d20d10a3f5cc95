"""``docs/reference/compatibility.md`` names everything that is there, and nothing that is not."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import llm_datadist
from llm_datadist import CacheManager, LLMConfig, LLMDataDist, LLMStatusCode, status
from llm_datadist._core.options import RULES, parse_options
from llm_datadist.status import FeatureNotEnabledError
from tests.api import golden

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "reference" / "compatibility.md").read_text()
NAME = re.compile(r"`([\w.]+)`")
KINDS = re.compile(r"^(same|more|differs|see below)\b")


def rows(section: str) -> list[list[str]]:
    """The cells of the table of a section, without its head."""
    text = PAGE.split(f"\n## {section}\n")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def named(section: str, column: int = 0) -> list[str]:
    return [name for row in rows(section) for name in NAME.findall(row[column])]


def members(kind: type) -> set[str]:
    return set(golden.members_of(kind)) - set(golden.SPECIAL)


@pytest.mark.parametrize(
    ("section", "names"),
    [
        ("Import paths", set(golden.MODULES)),
        ("Types", set(llm_datadist.__all__)),
        ("LLMDataDist", members(LLMDataDist)),
        ("CacheManager", members(CacheManager)),
        ("Options", members(LLMConfig) - {"generate_options", "gen_options"}),
        ("Status codes", {code.name for code in LLMStatusCode}),
    ],
)
def test_every_name_has_its_row(section: str, names: set[str]) -> None:
    found = named(section)
    assert sorted(found) == sorted(names)


@pytest.mark.parametrize("section", ["Import paths", "Types", "LLMDataDist", "CacheManager"])
def test_every_row_says_whether_it_differs_and_why(section: str) -> None:
    for name, _, verdict in rows(section):
        assert KINDS.match(verdict), f"{name}: {verdict}"
        if "differs" in verdict:
            assert "because" in verdict or len(verdict) > 40, f"{name}: no reason"


def test_options_have_their_keys() -> None:
    table = {NAME.findall(prop)[0]: tuple(NAME.findall(keys)) for prop, keys, _ in rows("Options")}
    assert {rule.prop: rule.keys for rule in RULES} == {k: v for k, v in table.items() if k != "ge_options"}


BASE = {"llm.EnableCacheManager": "1"}
LATER_TEXT = {"verify_transfers": "xxh3", "retry_policy": "retries=1,backoff_ms=1", "metrics_port": "0"}


@pytest.mark.rule("4.106")
@pytest.mark.parametrize("row", rows("Options"), ids=lambda row: row[0])
def test_options_of_a_later_version_say_so(row: list[str]) -> None:
    prop, key = NAME.findall(row[0])[0], NAME.findall(row[1])
    if "not in this version" in row[2]:
        with pytest.raises(FeatureNotEnabledError, match=key[0]):
            parse_options({**BASE, key[0]: LATER_TEXT.get(prop, "x")})
    else:
        assert not any(rule.later(text) for rule in RULES if rule.prop == prop for text in ("x", "127.0.0.1"))


def codes_given() -> set[str]:
    """Codes that some line of the library, outside their definition, raises, returns or sends."""
    families = {kind.__name__: code.name for code, kind in status._FAMILIES.items()}
    found: set[str] = {"LLM_UNKNOWN_ERROR"}  # status.code_of gives it for numbers of a later version
    for path in (ROOT / "src").rglob("*.py"):
        if path.name == "status.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                if node.value.id == "LLMStatusCode":
                    found.add(node.attr)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in families:
                found.add(families[node.func.id])
    return found


def test_codes_marked_never_are_the_ones_that_nothing_gives() -> None:
    table = {NAME.findall(code)[0]: when for code, when in rows("Status codes")}
    given = {code for code, when in table.items() if not when.startswith("never")}
    assert given == codes_given() & set(table)


@pytest.mark.rule("5.68")
def test_what_is_not_in_this_version_is_not_there() -> None:
    """The rows go when the parts come."""
    missing = " ".join(row[0] for row in rows("Not in this version"))
    for name in ("block_generations", "retire_blocks"):
        assert name in missing and not hasattr(llm_datadist.Cache, name)
    assert "src_generations" in missing and "src_generations" not in golden.describe()
