"""Older path of the argument checks."""

from llm_datadist.checks import (
    check_int32,
    check_int64,
    check_isinstance,
    check_list_int32,
    check_uint8,
    check_uint16,
    check_uint32,
    check_uint64,
)

__all__ = [
    "check_int32",
    "check_int64",
    "check_isinstance",
    "check_list_int32",
    "check_uint8",
    "check_uint16",
    "check_uint32",
    "check_uint64",
]
