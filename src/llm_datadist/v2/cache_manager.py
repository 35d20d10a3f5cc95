"""Older path of CacheManager and what goes with it; new code imports from ``llm_datadist``."""

from llm_datadist.cache_manager import CacheManager
from llm_datadist.v2 import llm_types
from llm_datadist.v2.llm_types import *  # noqa: F403 - what it lists, no more

__all__ = ["CacheManager", *llm_types.__all__]
