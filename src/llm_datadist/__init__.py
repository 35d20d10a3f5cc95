"""Moves KV caches between the processes of a serving cluster.

Importing this does no I/O, starts no thread and reads no environment. What needs NumPy (the facade) is
loaded when its name is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llm_datadist.caches import Cache, CacheDesc, KvCache, MemInfo
from llm_datadist.clusters import LinkInfo, LLMClusterInfo, Notify
from llm_datadist.data_type import DataType
from llm_datadist.enums import LLMRole, Memtype, Placement, RegisterMemStatus
from llm_datadist.infos import CacheInfo, PoolInfo
from llm_datadist.keys import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex
from llm_datadist.layerwise import LayerSynchronizer, TransferConfig, TransferWithCacheKeyConfig
from llm_datadist.status import (
    CacheNotExistError,
    EngineFinalizedError,
    FeatureNotEnabledError,
    LinkBusyError,
    LinkFailedError,
    LLMException,
    LLMStatusCode,
    NotLinkedError,
    OutOfMemoryError,
    ParamInvalidError,
    Status,
    TransferTimeoutError,
)
from llm_datadist.tasks import CacheTask

if TYPE_CHECKING:
    from llm_datadist.cache_manager import CacheManager
    from llm_datadist.config import LLMConfig, LlmConfig
    from llm_datadist.datadist import LLMDataDist

__all__ = [
    "BlocksCacheKey",
    "Cache",
    "CacheDesc",
    "CacheInfo",
    "CacheKey",
    "CacheKeyByIdAndIndex",
    "CacheManager",
    "CacheNotExistError",
    "CacheTask",
    "DataType",
    "EngineFinalizedError",
    "FeatureNotEnabledError",
    "KvCache",
    "LLMClusterInfo",
    "LLMConfig",
    "LLMDataDist",
    "LLMException",
    "LLMRole",
    "LLMStatusCode",
    "LayerSynchronizer",
    "LinkBusyError",
    "LinkFailedError",
    "LinkInfo",
    "LlmConfig",
    "MemInfo",
    "Memtype",
    "NotLinkedError",
    "Notify",
    "OutOfMemoryError",
    "ParamInvalidError",
    "Placement",
    "PoolInfo",
    "RegisterMemStatus",
    "Status",
    "TransferConfig",
    "TransferTimeoutError",
    "TransferWithCacheKeyConfig",
]

v2_list = list(__all__)
"""The public names, under the name that older callers look for."""

_LAZY = {
    "CacheManager": "llm_datadist.cache_manager",
    "LLMConfig": "llm_datadist.config",
    "LLMDataDist": "llm_datadist.datadist",
    "LlmConfig": "llm_datadist.config",
}


if not TYPE_CHECKING:  # a type checker must refuse a name that is not there

    def __getattr__(name: str) -> Any:
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        value = getattr(import_module(_LAZY[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
