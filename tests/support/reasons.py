"""Every text in the source that says why a transport is not used, and the register of what forces them.

A text is a template: ``{}`` where a value stands.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.pool import Spawner

SOURCE = Path(__file__).resolve().parents[2] / "src" / "llm_datadist"
TRANSPORTS = ("shm*.py", "_meeting.py", "local*.py", "tcp*.py")  # nixl's are forced by its own tests
# Where texts are made that others raise or show: all that reads like a sentence there counts.
MAKERS = {
    "_core/selection.py": ("choose", "_NOT_OFFERED"),
    "devices/shared_memory.py": ("seal",),
    "devices/slab.py": ("_map",),
    "transports/seam.py": ("NOT_THIS_CONNECTION",),
    "transports/local.py": ("_refusal",),
    "transports/shm_owner.py": ("welcome", "_answer", "whose_refusal"),
    "transports/shm_memory.py": ("__init__", "_receive", "_map", "_unsafe"),
}
# What a transport may raise without saying it there; each is made in one of the above.
PASSED_ON = {"NOT_THIS_CONNECTION", "refusal", "memory.reason", "_refusal(peer.pid, -got)"}
_NO_REFUSAL = (": chosen", ": {}")  # the lines that selection makes of a reason


@dataclass
class Stage:
    """What is needed to force a reason."""

    spawn: Spawner
    patch: pytest.MonkeyPatch


Force = Callable[[Stage], str]
FORCED: dict[str, tuple[Force, ...]] = {}


def forces(template: str) -> Callable[[Force], Force]:
    """Registers what makes a text appear and returns all that users are told."""

    def keep(force: Force) -> Force:
        FORCED[template] = (*FORCED.get(template, ()), force)
        return force

    return keep


def templates() -> set[str]:
    """All of them."""
    found = {text for _, text in _raised() if text is not None}
    for name, makers in MAKERS.items():
        for node in ast.walk(_parsed(SOURCE / name)):
            if _name_of(node) in makers:
                found |= set(_sentences(node))
    return found


def passed_on() -> set[str]:
    """What transports raise that is not a text of their own, as source code."""
    return {code for code, text in _raised() if text is None}


def pattern(template: str) -> re.Pattern[str]:
    """Matches the text with whatever values."""
    return re.compile(".*".join(re.escape(part) for part in template.split("{}")), re.DOTALL)


def _raised() -> Iterator[tuple[str, str | None]]:
    paths = sorted({p for glob in TRANSPORTS for p in (SOURCE / "transports").glob(glob)})
    for path in paths:
        for node in ast.walk(_parsed(path)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("TransportUnavailable"):
                yield ast.unparse(node.args[0]), _template(node.args[0])


def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def _name_of(node: ast.AST) -> str | None:
    if isinstance(node, ast.FunctionDef):
        return node.name
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    return None


def _sentences(node: ast.AST) -> Iterable[str]:
    """Texts of two words or more in a function or a value, its documentation left out."""
    inside: set[int] = set()
    for child in ast.walk(node):
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
            inside.add(id(child.value))
        text = _template(child) if id(child) not in inside else None
        if isinstance(child, ast.JoinedStr):
            inside |= {id(part) for part in child.values}
        if text is not None and re.search(r"[a-z] [a-z{]", text) and not text.startswith(_NO_REFUSAL):
            yield text


def _template(node: ast.AST) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(p.value if isinstance(p, ast.Constant) else "{}" for p in node.values)  # type: ignore[misc]
    return None
