"""Argument checks: wrong type TypeError, integer out of range ValueError; the texts name argument and value.

``bool`` and ``float`` are not integers; NumPy integers are, and come back as ``int``.
"""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral
from typing import Any


def check_isinstance(
    name: str,
    value: Any,
    types: type[Any] | Iterable[type[Any]],
    allow_none: bool = False,
) -> Any:
    """Checks the type of an argument.

    Args:
        name: The argument's name, for the text.
        value: What the caller gave.
        types: One class, or several of which one must fit. ``int`` takes NumPy integers and refuses bool.
        allow_none: Whether None is fine as well.

    Returns:
        The value; a NumPy integer as ``int``.

    Raises:
        TypeError: None of the classes fits.
    """
    if value is None and allow_none:
        return None
    kinds = (types,) if isinstance(types, type) else tuple(types)
    if isinstance(value, bool):
        if bool in kinds or object in kinds:
            return value
    elif isinstance(value, kinds):
        return value
    elif int in kinds and isinstance(value, Integral):
        return int(value)
    wanted = " or ".join([kind.__name__ for kind in kinds] + ["None"] * allow_none)
    raise TypeError(f"{name} must be {wanted}, not {type(value).__name__} ({value!r:.200})")


def as_int(name: str, value: Any) -> int:
    """``value`` as a Python int.

    Raises:
        TypeError: It is not an integer; bool and float are not.
    """
    if type(value) is int:
        return value
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an int, not {type(value).__name__} ({value!r:.200})")
    return int(value)


def check_range(name: str, value: Any, low: int, high: int) -> int:
    """``value`` as an int within [low, high].

    Raises:
        TypeError: Not an integer.
        ValueError: Outside the range.
    """
    number = as_int(name, value)
    if low <= number <= high:
        return number
    raise ValueError(f"{name} is {number}; it must lie in [{low}, {high}]")


def check_uint64(name: str, value: Any) -> int:
    """An int in [0, 2**64); TypeError or ValueError otherwise."""
    return check_range(name, value, 0, 2**64 - 1)


def check_int64(name: str, value: Any) -> int:
    """An int in [-2**63, 2**63); TypeError or ValueError otherwise."""
    return check_range(name, value, -(2**63), 2**63 - 1)


def check_uint32(name: str, value: Any) -> int:
    """An int in [0, 2**32); TypeError or ValueError otherwise."""
    return check_range(name, value, 0, 2**32 - 1)


def check_int32(name: str, value: Any) -> int:
    """An int in [-2**31, 2**31); TypeError or ValueError otherwise."""
    return check_range(name, value, -(2**31), 2**31 - 1)


def check_uint16(name: str, value: Any) -> int:
    """An int in [0, 2**16); TypeError or ValueError otherwise."""
    return check_range(name, value, 0, 2**16 - 1)


def check_uint8(name: str, value: Any) -> int:
    """An int in [0, 2**8); TypeError or ValueError otherwise."""
    return check_range(name, value, 0, 2**8 - 1)


def check_list_int32(name: str, value: Any) -> list[int]:
    """A list or tuple of int32 as a new list; TypeError or ValueError otherwise."""
    check_isinstance(name, value, (list, tuple))
    return [check_int32(f"{name}[{i}]", entry) for i, entry in enumerate(value)]


def check_list_uint64(name: str, value: Any) -> tuple[int, ...]:
    """A list or tuple of uint64 (addresses) as a tuple; TypeError or ValueError otherwise."""
    check_isinstance(name, value, (list, tuple))
    return tuple([check_uint64(f"{name}[{i}]", entry) for i, entry in enumerate(value)])
