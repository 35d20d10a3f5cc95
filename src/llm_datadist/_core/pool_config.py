"""The text of a pool option: ``{"memory_size": bytes, "page_shift": 10..30}``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llm_datadist._core.option_rules import BrokenRuleError

DEFAULT_PAGE_SHIFT = 16
_PAGE_SHIFTS = range(10, 31)
_INT64_MAX = (1 << 63) - 1
_FIELDS = frozenset({"memory_size", "page_shift"})


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """A pool: its bytes, the power of two of its page size, and fields that mean nothing here."""

    memory_nbytes: int
    page_shift: int = DEFAULT_PAGE_SHIFT
    unknown: tuple[str, ...] = ()


def read_pool(fields: Mapping[str, Any]) -> PoolConfig:
    """The pool that a JSON object describes.

    Raises:
        BrokenRuleError: A field is missing, of a wrong type or outside its range.
    """
    size, shift = fields.get("memory_size"), fields.get("page_shift", DEFAULT_PAGE_SHIFT)
    if not isinstance(size, int) or isinstance(size, bool) or not 0 < size <= _INT64_MAX:
        raise BrokenRuleError(f"a JSON object whose memory_size is a number of bytes > 0 (it is {size!r})")
    if not isinstance(shift, int) or isinstance(shift, bool) or shift not in _PAGE_SHIFTS:
        raise BrokenRuleError(f"a JSON object whose page_shift lies in 10..30 (it is {shift!r})")
    if size < 1 << shift:
        raise BrokenRuleError(
            f"a JSON object whose memory_size ({size}) holds at least one page of {1 << shift} bytes"
        )
    return PoolConfig(size, shift, tuple(sorted(set(fields) - _FIELDS)))
