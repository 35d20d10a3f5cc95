"""Older path of the logger: a plain one of the standard library, named "llm_datadist"."""

import logging

log = logger = logging.getLogger("llm_datadist")
debug = log.debug
info = log.info
warning = log.warning
error = log.error
critical = log.critical
exception = log.exception

__all__ = ["critical", "debug", "error", "exception", "info", "log", "logger", "warning"]
