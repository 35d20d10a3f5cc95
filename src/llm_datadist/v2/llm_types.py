"""Older path of the types; new code imports them from ``llm_datadist``."""

from llm_datadist.caches import Cache, CacheDesc, KvCache, MemInfo
from llm_datadist.clusters import LLMClusterInfo
from llm_datadist.data_type import DataType
from llm_datadist.enums import LLMRole, Memtype, Placement, RegisterMemStatus
from llm_datadist.keys import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex
from llm_datadist.layerwise import LayerSynchronizer, TransferConfig, TransferWithCacheKeyConfig
from llm_datadist.status import LLMException, LLMStatusCode, Status
from llm_datadist.tasks import CacheTask

__all__ = [
    "BlocksCacheKey",
    "Cache",
    "CacheDesc",
    "CacheKey",
    "CacheKeyByIdAndIndex",
    "CacheTask",
    "DataType",
    "KvCache",
    "LLMClusterInfo",
    "LLMException",
    "LLMRole",
    "LLMStatusCode",
    "LayerSynchronizer",
    "MemInfo",
    "Memtype",
    "Placement",
    "RegisterMemStatus",
    "Status",
    "TransferConfig",
    "TransferWithCacheKeyConfig",
]
