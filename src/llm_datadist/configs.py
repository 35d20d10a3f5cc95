"""Older path of the configuration; new code imports it from ``llm_datadist``."""

from llm_datadist.clusters import LLMClusterInfo
from llm_datadist.config import LLMConfig, LlmConfig
from llm_datadist.enums import LLMRole

__all__ = ["LLMClusterInfo", "LLMConfig", "LLMRole", "LlmConfig"]
