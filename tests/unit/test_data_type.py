"""The numbers and sizes of the element types, and their NumPy counterparts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from llm_datadist import data_type
from llm_datadist.data_type import DataType, dtype_nbytes

TABLE = {
    "DT_FLOAT": (0, 4),
    "DT_FLOAT16": (1, 2),
    "DT_INT8": (2, 1),
    "DT_INT32": (3, 4),
    "DT_UINT8": (4, 1),
    "DT_INT16": (6, 2),
    "DT_UINT16": (7, 2),
    "DT_UINT32": (8, 4),
    "DT_INT64": (9, 8),
    "DT_UINT64": (10, 8),
    "DT_DOUBLE": (11, 8),
    "DT_BOOL": (12, 1),
    "DT_STRING": (13, 16),
    "DT_BF16": (27, 2),
}


@pytest.mark.rule("1.18")
def test_values_and_sizes() -> None:
    assert {d.name: (d.value, dtype_nbytes(d)) for d in DataType} == TABLE


@pytest.mark.rule("1.7")
def test_numpy_maps_agree_with_sizes() -> None:
    assert data_type.dtype_to_np_dtype[DataType.DT_DOUBLE] == np.float64
    for kind, np_dtype in data_type.dtype_to_np_dtype.items():
        assert np_dtype.itemsize == dtype_nbytes(kind)
        assert data_type.np_dtype_to_dtype[np_dtype] is kind
        assert np_dtype in data_type.valid_np_dtypes
    missing = set(DataType) - set(data_type.dtype_to_np_dtype)
    assert missing == {DataType.DT_STRING, DataType.DT_BF16}


def test_unknown_attribute() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = data_type.nothing
    assert "valid_np_dtypes" in dir(data_type)


@pytest.mark.rule("1.7")
def test_maps_load_numpy_only_when_asked() -> None:
    program = (
        "import sys, llm_datadist.data_type as d; a = 'numpy' in sys.modules;"
        "d.valid_np_dtypes; print(a, 'numpy' in sys.modules)"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(data_type.__file__).parents[1])}
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=env)
    assert out.stdout.split() == ["False", "True"]
