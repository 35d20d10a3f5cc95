"""Enumerations that callers pass: roles, placements, kinds of memory, states of a registration."""

from __future__ import annotations

from enum import Enum, IntEnum


class LLMRole(IntEnum):
    """What a process mainly does. It has no influence on what may be transferred."""

    PROMPT = 1
    DECODER = 2
    MIX = 3


class Placement(IntEnum):
    """Where the memory of a cache lies."""

    HOST = 0
    DEVICE = 1


class Memtype(Enum):
    """Kind of memory of a :class:`MemInfo`; note that it counts the other way round than Placement."""

    MEM_TYPE_DEVICE = 0
    MEM_TYPE_HOST = 1


class RegisterMemStatus(Enum):
    """How far a two-sided ``link`` has come."""

    OK = 0
    PREPARING = 1
    FAILED = 2
