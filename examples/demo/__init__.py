"""Disaggregated serving of a real model: one prefill process, one decode process. See ``__main__``."""
