"""Older import paths of the same names; new code imports from ``llm_datadist``."""
