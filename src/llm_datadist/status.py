"""Status codes and exceptions: what went wrong, by code, by class and in words."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

_BASE = 0x5010B000


class LLMStatusCode(IntEnum):
    """Result codes of the interface; ``str()`` gives ``LLMStatusCode.LLM_X``."""

    LLM_SUCCESS = 0
    LLM_FAILED = 0xFFFFFFFF
    LLM_UNKNOWN_ERROR = -1
    LLM_WAIT_PROCESS_TIMEOUT = _BASE + 1
    LLM_KV_CACHE_NOT_EXIST = _BASE + 2
    LLM_REPEAT_REQUEST = _BASE + 3
    LLM_REQUEST_ALREADY_COMPLETED = _BASE + 4
    LLM_PARAM_INVALID = _BASE + 5
    LLM_ENGINE_FINALIZED = _BASE + 6
    LLM_NOT_YET_LINK = _BASE + 7
    LLM_ALREADY_LINK = _BASE + 8
    LLM_LINK_FAILED = _BASE + 9
    LLM_UNLINK_FAILED = _BASE + 10
    LLM_NOTIFY_PROMPT_UNLINK_FAILED = _BASE + 11
    LLM_CLUSTER_NUM_EXCEED_LIMIT = _BASE + 12
    LLM_PROCESSING_LINK = _BASE + 13
    LLM_DEVICE_OUT_OF_MEMORY = _BASE + 14
    LLM_PREFIX_ALREADY_EXIST = _BASE + 15
    LLM_PREFIX_NOT_EXIST = _BASE + 16
    LLM_SEQ_LENOVERLIMIT = _BASE + 17
    LLM_NO_FREE_BLOCK = _BASE + 18
    LLM_BLOCKS_OUT_OF_MEMORY = _BASE + 19
    LLM_EXIST_LINK = _BASE + 24
    LLM_FEATURE_NOT_ENABLED = _BASE + 25
    LLM_TIMEOUT = _BASE + 26
    LLM_LINK_BUSY = _BASE + 27
    LLM_OUT_OF_MEMORY = _BASE + 28
    LLM_DEVICE_MEM_ERROR = 507053
    LLM_SUSPECT_REMOTE_ERROR = 507057

    def __str__(self) -> str:
        return f"LLMStatusCode.{self.name}"


class LLMException(RuntimeError):
    """Any failure of the library that is not a wrong Python type or an integer out of range.

    Args:
        *args: The text: object, offending value, rule, and what to do next.
        status_code: The code of the failure. Subclasses fix it.
    """

    def __init__(self, *args: object, status_code: LLMStatusCode = LLMStatusCode.LLM_SUCCESS) -> None:
        super().__init__(*args)
        self._status_code = status_code

    @property
    def status_code(self) -> LLMStatusCode:
        """The :class:`LLMStatusCode` of this failure."""
        return self._status_code


class ParamInvalidError(LLMException):
    """LLM_PARAM_INVALID: an argument breaks a rule; nothing was changed."""

    def __init__(self, text: str) -> None:
        super().__init__(text, status_code=LLMStatusCode.LLM_PARAM_INVALID)


class CacheNotExistError(LLMException):
    """LLM_KV_CACHE_NOT_EXIST: the cache, key or batch index is not (or no longer) there.

    Attributes:
        stale_blocks: Block ids whose generation had moved on; empty for other reasons.
    """

    def __init__(self, text: str, *, stale_blocks: Sequence[int] = ()) -> None:
        super().__init__(text, status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST)
        self.stale_blocks: tuple[int, ...] = tuple(stale_blocks)


class NotLinkedError(LLMException):
    """LLM_NOT_YET_LINK: there is no link to that cluster."""

    def __init__(self, text: str) -> None:
        super().__init__(text, status_code=LLMStatusCode.LLM_NOT_YET_LINK)


class LinkFailedError(LLMException):
    """LLM_LINK_FAILED: a link could not be made, or went down during the call."""

    def __init__(self, text: str) -> None:
        super().__init__(text, status_code=LLMStatusCode.LLM_LINK_FAILED)


class TransferTimeoutError(LLMException):
    """LLM_WAIT_PROCESS_TIMEOUT (pulls) or LLM_TIMEOUT (pushes, layer-wise, pings)."""

    def __init__(self, text: str, *, status_code: LLMStatusCode = LLMStatusCode.LLM_TIMEOUT) -> None:
        super().__init__(text, status_code=status_code)


class LinkBusyError(LLMException):
    """LLM_LINK_BUSY: transfers are in flight on the link, or the engine waits for the calling signal handler."""

    def __init__(self, text: str) -> None:
        super().__init__(text, status_code=LLMStatusCode.LLM_LINK_BUSY)


class OutOfMemoryError(LLMException):
    """LLM_OUT_OF_MEMORY: a pool or a queue is full, or the system has no thread, descriptor or memory left."""

    def __init__(self, text: str) -> None:
        super().__init__(text, status_code=LLMStatusCode.LLM_OUT_OF_MEMORY)


class FeatureNotEnabledError(LLMException):
    """LLM_FEATURE_NOT_ENABLED: the option or build does not offer this."""

    def __init__(self, text: str) -> None:
        super().__init__(text, status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED)


class EngineFinalizedError(LLMException):
    """LLM_ENGINE_FINALIZED: the engine was finalized before or during the call."""

    def __init__(self, text: str) -> None:
        super().__init__(text, status_code=LLMStatusCode.LLM_ENGINE_FINALIZED)


_FAMILIES: dict[LLMStatusCode, type[LLMException]] = {
    LLMStatusCode.LLM_PARAM_INVALID: ParamInvalidError,
    LLMStatusCode.LLM_KV_CACHE_NOT_EXIST: CacheNotExistError,
    LLMStatusCode.LLM_NOT_YET_LINK: NotLinkedError,
    LLMStatusCode.LLM_LINK_FAILED: LinkFailedError,
    LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT: TransferTimeoutError,
    LLMStatusCode.LLM_TIMEOUT: TransferTimeoutError,
    LLMStatusCode.LLM_LINK_BUSY: LinkBusyError,
    LLMStatusCode.LLM_OUT_OF_MEMORY: OutOfMemoryError,
    LLMStatusCode.LLM_FEATURE_NOT_ENABLED: FeatureNotEnabledError,
    LLMStatusCode.LLM_ENGINE_FINALIZED: EngineFinalizedError,
}


def error_of(code: LLMStatusCode, text: str) -> LLMException:
    """The exception of the family that ``code`` belongs to, for codes that arrive as data."""
    family = _FAMILIES.get(code)
    if family is None:
        return LLMException(text, status_code=code)
    if family is TransferTimeoutError:
        return TransferTimeoutError(text, status_code=code)
    return family(text)


def code_of(number: int) -> LLMStatusCode:
    """The status code with this number; LLM_UNKNOWN_ERROR for one that we do not know."""
    try:
        return LLMStatusCode(number)
    except ValueError:
        return LLMStatusCode.LLM_UNKNOWN_ERROR


class Status:
    """A status code as an object, as some callers expect it."""

    def __init__(self, status_code: LLMStatusCode) -> None:
        self._status_code = status_code

    @property
    def status_code(self) -> LLMStatusCode:
        """The wrapped code."""
        return self._status_code

    def is_ok(self) -> bool:
        """Whether the code is LLM_SUCCESS."""
        return self._status_code == LLMStatusCode.LLM_SUCCESS

    def __repr__(self) -> str:
        return f"Status({self._status_code!s})"
