"""Describes the public interface as text: ``python -m tests.api.golden`` writes it to ``golden.txt``.

Only after the difference has been held against the contract, line by line: callers depend on every one of them.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llm_datadist

FILE = Path(__file__).with_name("golden.txt")
MODULES = [
    "llm_datadist",
    "llm_datadist.status",
    "llm_datadist.data_type",
    "llm_datadist.configs",
    "llm_datadist.v2.llm_types",
    "llm_datadist.v2.llm_datadist",
    "llm_datadist.v2.cache_manager",
    "llm_datadist.utils.log",
    "llm_datadist.utils.utils",
]
SPECIAL = ("__init__", "__await__")


def describe() -> str:
    """Every public name, signature, default, property and value, one a line."""
    lines: list[str] = []
    for module in MODULES:
        lines += [f"module {module}", *(f"  {name}" for name in names_of(module)), ""]
    for name in sorted(llm_datadist.__all__):
        lines += [*_class(name, getattr(llm_datadist, name)), ""]
    checks = importlib.import_module("llm_datadist.utils.utils")
    lines += [f"def {name}{_signature(getattr(checks, name))}" for name in checks.__all__]
    return "\n".join(lines) + "\n"


def names_of(module: str) -> list[str]:
    """What a module offers to callers."""
    loaded = importlib.import_module(module)
    listed = getattr(loaded, "__all__", None)
    if listed is None:
        listed = [n for n in dir(loaded) if not n.startswith("_") and _is_own(loaded, n)]
    return sorted(listed)


def _is_own(module: Any, name: str) -> bool:
    value = getattr(module, name)
    if name in getattr(module, "_LAZY", ()):
        return True
    return getattr(value, "__module__", None) == module.__name__


def members_of(kind: type[Any]) -> dict[str, Any]:
    """Public methods and properties, inherited ones of ours included; fields of a dataclass are not."""
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.startswith("llm_datadist"):
            found |= {n: v for n, v in vars(base).items() if not n.startswith("_") or n in SPECIAL}
    fields = {f.name for f in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()
    return {name: value for name, value in sorted(found.items()) if name not in fields}


def _class(name: str, kind: Any) -> Iterator[str]:
    bases = ", ".join(base.__name__ for base in kind.__bases__ if base is not object)
    alias = "" if kind.__name__ == name else f" = {kind.__name__}"
    yield f"class {name}{alias}" + (f"({bases})" if bases and not alias else "")
    if alias:
        return
    if issubclass(kind, enum.Enum):
        yield from (f"  {member.name} = {member.value}" for member in kind)
        return
    if dataclasses.is_dataclass(kind):
        yield from (f"  field {f.name}: {f.type}" for f in dataclasses.fields(kind))
        yield f"  def __init__{_signature(kind)}"
    for member, value in members_of(kind).items():
        if not (dataclasses.is_dataclass(kind) and member == "__init__"):
            yield f"  {_member(kind, member, value)}"


def _signature(function: Any) -> str:
    text = str(inspect.signature(function)).replace("'", "")  # annotations are text in our modules
    return re.sub(r"<object object at \w+>", "<not given>", text)


def _member(kind: type[Any], name: str, value: Any) -> str:
    if isinstance(value, property):
        signature = inspect.signature(value.fget) if value.fget else None
        returns = signature.return_annotation if signature else ""
        return f"property {name}: {returns}" + (", settable" if value.fset else "")
    if isinstance(value, classmethod):
        return f"classmethod {name}{_signature(getattr(kind, name))}"
    if callable(value):
        return f"def {name}{_signature(value)}"
    if hasattr(value, "__set__"):
        types = getattr(value, "__orig_class__", None)
        return f"property {name}: {_type_text(types)}, settable"
    return f"{name} = {value!r}"


def _type_text(generic: Any) -> str:
    (wanted,) = getattr(generic, "__args__", ("?",))
    text = wanted.__name__ if isinstance(wanted, type) and not hasattr(wanted, "__args__") else str(wanted)
    return text.replace("collections.abc.", "").replace("typing.", "") + " | None"


if __name__ == "__main__":
    FILE.write_text(describe())
