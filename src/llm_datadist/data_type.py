"""Element types of tensors and their sizes; the NumPy maps are built at first use.

``dtype_to_np_dtype``, ``np_dtype_to_dtype`` and ``valid_np_dtypes`` are module attributes that import
NumPy when somebody asks for them, so that importing the vocabulary stays cheap.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    dtype_to_np_dtype: dict[DataType, np.dtype[Any]]
    np_dtype_to_dtype: dict[np.dtype[Any], DataType]
    valid_np_dtypes: tuple[np.dtype[Any], ...]


class DataType(Enum):
    """Element type of a tensor. The numbers are part of the interface."""

    DT_FLOAT = 0
    DT_FLOAT16 = 1
    DT_INT8 = 2
    DT_INT32 = 3
    DT_UINT8 = 4
    DT_INT16 = 6
    DT_UINT16 = 7
    DT_UINT32 = 8
    DT_INT64 = 9
    DT_UINT64 = 10
    DT_DOUBLE = 11
    DT_BOOL = 12
    DT_STRING = 13
    DT_BF16 = 27


_NBYTES = {
    DataType.DT_FLOAT: 4,
    DataType.DT_FLOAT16: 2,
    DataType.DT_INT8: 1,
    DataType.DT_INT32: 4,
    DataType.DT_UINT8: 1,
    DataType.DT_INT16: 2,
    DataType.DT_UINT16: 2,
    DataType.DT_UINT32: 4,
    DataType.DT_INT64: 8,
    DataType.DT_UINT64: 8,
    DataType.DT_DOUBLE: 8,
    DataType.DT_BOOL: 1,
    DataType.DT_STRING: 16,
    DataType.DT_BF16: 2,
}

# DT_STRING (an opaque 16-byte handle) and DT_BF16 have no NumPy type of their own.
_NP_NAMES = {
    DataType.DT_FLOAT: "float32",
    DataType.DT_FLOAT16: "float16",
    DataType.DT_INT8: "int8",
    DataType.DT_INT32: "int32",
    DataType.DT_UINT8: "uint8",
    DataType.DT_INT16: "int16",
    DataType.DT_UINT16: "uint16",
    DataType.DT_UINT32: "uint32",
    DataType.DT_INT64: "int64",
    DataType.DT_UINT64: "uint64",
    DataType.DT_DOUBLE: "float64",
    DataType.DT_BOOL: "bool",
}

_LAZY = ("dtype_to_np_dtype", "np_dtype_to_dtype", "valid_np_dtypes")


def dtype_nbytes(data_type: DataType) -> int:
    """Bytes of one element."""
    return _NBYTES[data_type]


if not TYPE_CHECKING:  # a type checker must refuse a name that is not there

    def __getattr__(name: str) -> Any:
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import numpy as np

        forward = {data_type: np.dtype(np_name) for data_type, np_name in _NP_NAMES.items()}
        globals().update(
            dtype_to_np_dtype=forward,
            np_dtype_to_dtype={np_dtype: data_type for data_type, np_dtype in forward.items()},
            valid_np_dtypes=tuple(forward.values()),
        )
        return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
