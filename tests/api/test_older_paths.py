"""Contract 1: older import paths give the same objects."""

from __future__ import annotations

import importlib
import logging
import subprocess
import sys

import numpy as np
import pytest

import llm_datadist

TYPES = [
    "BlocksCacheKey", "Cache", "CacheDesc", "CacheKey", "CacheKeyByIdAndIndex", "CacheTask", "DataType", "KvCache",
    "LLMClusterInfo", "LLMException", "LLMRole", "LLMStatusCode", "LayerSynchronizer", "MemInfo", "Memtype",
    "Placement", "RegisterMemStatus", "Status", "TransferConfig", "TransferWithCacheKeyConfig",
]  # fmt: skip
CHECKS = [
    "check_isinstance", "check_uint64", "check_int64", "check_int32", "check_uint32", "check_uint16", "check_uint8",
    "check_list_int32",
]  # fmt: skip
PATHS = {
    "llm_datadist.v2.llm_types": TYPES,
    "llm_datadist.v2.llm_datadist": [*TYPES, "LLMDataDist", "LLMConfig", "LlmConfig", "CacheManager"],
    "llm_datadist.v2.cache_manager": [*TYPES, "CacheManager"],
    "llm_datadist.configs": ["LLMConfig", "LlmConfig", "LLMRole", "LLMClusterInfo"],
    "llm_datadist.status": ["LLMStatusCode", "LLMException", "Status"],
    "llm_datadist.data_type": ["DataType"],
}
ERRORS = [
    "ParamInvalidError", "CacheNotExistError", "NotLinkedError", "LinkFailedError", "TransferTimeoutError",
    "LinkBusyError", "OutOfMemoryError", "FeatureNotEnabledError", "EngineFinalizedError",
]  # fmt: skip


@pytest.mark.rule("1.3")
@pytest.mark.parametrize(("path", "name"), [(path, name) for path, names in PATHS.items() for name in names])
def test_same_object(path: str, name: str) -> None:
    assert getattr(importlib.import_module(path), name) is getattr(llm_datadist, name)


@pytest.mark.rule("1.40")
@pytest.mark.parametrize("name", ERRORS)
def test_error_classes_are_in_status_too(name: str) -> None:
    error = getattr(llm_datadist.status, name)
    assert error is getattr(llm_datadist, name)
    assert issubclass(error, llm_datadist.LLMException)


@pytest.mark.rule("1.5")
@pytest.mark.parametrize("name", CHECKS)
def test_argument_checks(name: str) -> None:
    module = importlib.import_module("llm_datadist.utils.utils")
    check = getattr(module, name)
    arguments = (int,) if name == "check_isinstance" else ()
    good = [np.int32(3)] if name == "check_list_int32" else np.int32(3)
    assert check("n", good, *arguments) == ([3] if name == "check_list_int32" else 3)
    with pytest.raises(TypeError, match="n"):
        check("n", "3", *arguments)


@pytest.mark.rule("1.4")
def test_log_module(caplog: pytest.LogCaptureFixture) -> None:
    module = importlib.import_module("llm_datadist.utils.log")
    assert isinstance(module.log, logging.Logger)
    for level in ("debug", "info", "warning", "error", "critical", "exception"):
        with caplog.at_level(logging.DEBUG, "llm_datadist"):
            getattr(module, level)("%s line", level)
        record = caplog.records[-1]
        assert (record.name, record.getMessage()) == ("llm_datadist", f"{level} line")
        assert record.pathname == __file__, "the caller's line, not ours"


@pytest.mark.rule("1.6")
def test_v2_list() -> None:
    assert sorted(llm_datadist.v2_list) == sorted(llm_datadist.__all__)
    assert set(TYPES) | {"LLMDataDist", "LLMConfig", "CacheManager"} <= set(llm_datadist.v2_list)


def test_star_imports() -> None:
    namespace: dict[str, object] = {}
    exec("from llm_datadist import *", namespace)
    assert set(llm_datadist.__all__) <= set(namespace)
    exec("from llm_datadist.v2.llm_types import *\nfrom llm_datadist.utils.utils import *", namespace)
    assert set(CHECKS) <= set(namespace)


@pytest.mark.rule("1.7")
def test_lazy_numpy_maps() -> None:
    program = (
        "import sys; from llm_datadist import data_type as d; assert 'numpy' not in sys.modules; "
        "m = d.dtype_to_np_dtype; import numpy as np; assert m[d.DataType.DT_FLOAT16] == np.float16; "
        "assert d.np_dtype_to_dtype[np.dtype('int8')] is d.DataType.DT_INT8; "
        "assert np.dtype('float32') in d.valid_np_dtypes"
    )
    environment = {
        "PYTHONPATH": str(importlib.import_module("pathlib").Path(llm_datadist.__file__).parents[1])
    }
    subprocess.run([sys.executable, "-c", program], check=True, env=environment, timeout=30)
