"""Older path of LLMDataDist and what goes with it; new code imports from ``llm_datadist``."""

from llm_datadist.cache_manager import CacheManager
from llm_datadist.config import LLMConfig, LlmConfig
from llm_datadist.datadist import LLMDataDist
from llm_datadist.v2 import llm_types
from llm_datadist.v2.llm_types import *  # noqa: F403 - what it lists, no more

__all__ = ["CacheManager", "LLMConfig", "LLMDataDist", "LlmConfig", *llm_types.__all__]
