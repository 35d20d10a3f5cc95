"""The layers of the design: who may import whom."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[2] / "src"
PACKAGE = "llm_datadist"

VOCABULARY = {
    "_logs", "_waiting", "_shortages", "_accepting",
    "status", "data_type", "checks", "enums", "keys", "caches", "clusters", "layerwise", "tasks", "notify", "infos",
}  # fmt: skip
FACADE = {"datadist", "links", "cache_manager", "transfers", "transfer_requests", "config"}
# Paths that older callers import: re-exports of a few lines, allowed what the facade is.
COMPAT = {"v2", "utils", "configs"}
# What any transport may share; the rest of `transports` are movers that do not know each other.
SHARED = {"seam", "movers"}
# What touches a package of others; only its transport knows it.
ENGINES = {"_nixl": "nixl"}

# layer -> layers of ours that it may import besides itself
MAY_IMPORT: dict[str, set[str]] = {
    "vocabulary": set(),
    "_core": {"vocabulary"},
    "_wire": {"vocabulary", "_core"},
    "devices": {"vocabulary", "_core"},
    "observe": {"vocabulary"},
    "transports": {"vocabulary", "_core", "_wire", "devices", "observe"},
    "_link": {"vocabulary", "_core", "_wire", "observe"},
    "_engine": {"vocabulary", "_core", "_wire", "_link", "transports", "devices", "observe"},
    "facade": {"vocabulary", "_core", "_engine", "observe"},
    "compat": {"vocabulary", "facade"},
    "testing": {"vocabulary", "_core", "_wire", "transports", "facade"},
    "cli": {"vocabulary", "facade"},
    "integrations": {"vocabulary", "facade"},
}
PURE = {"socket", "threading", "time", "os", "ctypes", "torch"}
MAY_NOT_USE: dict[str, set[str]] = {
    "vocabulary": {"socket", "os", "ctypes", "torch"},
    "_core": PURE,
    "_wire": PURE,
    "_link": {"ctypes", "torch"},
    "_engine": {"socket", "ctypes"},
    "facade": {"socket", "threading", "ctypes", "numpy"},
    "compat": {"socket", "threading", "ctypes"},
}
# The one-instance rule is the only global state and needs a lock; it is not part of the facade's modules.
BELOW_FACADE = {"_instances"}


def layer_of(module: str) -> str:
    """The layer of a module of ours, by its dotted name without the package."""
    head = module.split(".")[0]
    if head in VOCABULARY:
        return "vocabulary"
    if head in FACADE or head == "":
        return "facade"
    if head in COMPAT:
        return "compat"
    if head in BELOW_FACADE:
        return "_engine"
    return head


def _modules() -> Iterator[tuple[str, Path]]:
    for path in sorted((SRC / PACKAGE).rglob("*.py")):
        parts = list(path.relative_to(SRC / PACKAGE).with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        yield ".".join(parts), path


def imports_of(source: str, module: str, is_package: bool = False) -> set[str]:
    """Absolute dotted names that a module imports, at any depth.

    Names for types only (under TYPE_CHECKING) count when they are ours: a layer must not even speak of what
    is above it, but it may name a socket that it passes on.
    """
    found: set[str] = set()
    package = f"{PACKAGE}.{module}".rstrip(".").split(".")
    if not is_package:
        package = package[:-1]
    tree = ast.parse(source)
    for_types = {n for block in ast.walk(tree) if _is_for_types(block) for n in ast.walk(block)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = {alias.name for alias in node.names}
            found |= {n for n in names if node not in for_types or n.startswith(PACKAGE)}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            found |= {f"{name}.{alias.name}" for alias in node.names} if name == PACKAGE else {name}
    return found


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def violations(module: str, imported: set[str]) -> list[str]:
    """What in a module's imports its layer does not allow."""
    layer = layer_of(module)
    if layer not in MAY_IMPORT:
        return [f"{module}: the layer {layer!r} is not in the table"]
    bad = []
    for name in sorted(imported):
        if name == PACKAGE or name.startswith(PACKAGE + "."):
            target = name[len(PACKAGE) + 1 :]
            other = layer_of(target)
            if other != layer and other not in MAY_IMPORT[layer]:
                bad.append(f"{module} ({layer}) imports {target} ({other})")
            if layer == other == "transports":
                bad += _between_transports(module, target)
        elif name.split(".")[0] in MAY_NOT_USE.get(layer, set()):
            bad.append(f"{module} ({layer}) imports {name}")
    return bad


def _between_transports(module: str, target: str) -> list[str]:
    def mover(name: str) -> str:
        tail = name.split(".")[1] if "." in name else ""
        if tail in ENGINES:
            return ENGINES[tail]
        return "" if tail in SHARED or tail.startswith("_") else tail.split("_")[0]

    mine, theirs = mover(module), mover(target)
    if mine and theirs and mine != theirs:
        return [f"{module} imports the transport {target}"]
    return []


@pytest.mark.parametrize(("module", "path"), list(_modules()), ids=lambda value: str(value)[-40:])
def test_a_module_imports_only_what_its_layer_may(module: str, path: Path) -> None:
    if module == "":
        pytest.skip("the package itself re-exports; test_packaging holds its import to its cost")
    imported = imports_of(path.read_text(), module, path.name == "__init__.py")
    assert not violations(module, imported)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("_core.x", "import threading"),
        ("_core.x", "from os import path"),
        ("_wire.x", "import time"),
        ("_core.x", "from llm_datadist._link import seam"),
        ("_core.x", "from ..transports import seam"),
        ("_link.x", "from llm_datadist.transports.seam import Channel"),
        ("_link.x", "def f():\n    import ctypes"),
        ("datadist", "import numpy as np"),
        ("transports.local", "from llm_datadist.transports.tcp import Tcp"),
        ("transports.tcp", "from llm_datadist.transports._nixl import agents"),
        ("transports._nixl", "import llm_datadist._engine.state"),
        ("transports.tcp", "from llm_datadist._engine import engine"),
        ("devices.cpu", "import llm_datadist._link.table"),
        ("status", "from llm_datadist import datadist"),
        ("_engine.x", "import socket"),
        ("_core.x", "if TYPE_CHECKING:\n    from llm_datadist._link import seam"),
        ("strange.x", "import json"),
    ],
)
def test_a_breach_is_found(module: str, source: str) -> None:
    assert violations(module, imports_of(source, module))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("_core.x", "import numpy\nfrom llm_datadist.status import LLMStatusCode"),
        ("transports.tcp", "from llm_datadist.transports.movers import Movers"),
        ("transports.tcp", "from llm_datadist.transports.tcp_frames import f"),
        ("transports.tcp", "from llm_datadist.transports._sockets import f"),
        ("transports.nixl", "from llm_datadist.transports._nixl import agents"),
        ("_engine.x", "from llm_datadist.transports.tcp import Tcp\nimport threading"),
        ("_engine.x", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import socket"),
    ],
)
def test_what_is_allowed_passes(module: str, source: str) -> None:
    assert not violations(module, imports_of(source, module))
