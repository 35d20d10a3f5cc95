"""What stopped a transfer -> the exception that its caller gets: one place for codes and texts."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TypeVar

from llm_datadist._engine.executor import MoveError, Stale
from llm_datadist._engine.state import describe
from llm_datadist._link.link import Link, LinkLost
from llm_datadist._shortages import is_shortage
from llm_datadist._wire.framing import ProtocolError
from llm_datadist.status import (
    CacheNotExistError,
    LinkFailedError,
    LLMException,
    LLMStatusCode,
    OutOfMemoryError,
    ParamInvalidError,
    TransferTimeoutError,
    code_of,
    error_of,
)
from llm_datadist.transports.seam import Fault, FaultKind

E = TypeVar("E", bound=LLMException)


class Refusal(Exception):  # noqa: N818 - what a peer said, not an error of this code
    """A peer's answer, as it came."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)  # all of it, so that it can be pickled with the error that it has caused
        self.code = code
        self.text = text

    def __str__(self) -> str:
        return f"{code_of(self.code)!s}: {self.text}"


@dataclass(frozen=True, slots=True)
class Context:
    """What a transfer was about, for texts and for the code of its time-out.

    Attributes:
        what: For example "pull of BlocksCacheKey(...) into cache 3".
        link: The peer.
        started: Instant of ``time.monotonic()``.
        timeout_code: LLM_WAIT_PROCESS_TIMEOUT for pulls, LLM_TIMEOUT for all others.
    """

    what: str
    link: Link
    started: float
    timeout_code: LLMStatusCode

    @property
    def where(self) -> str:
        """The transfer and its peer."""
        return f"{self.what}, {describe(self.link)}"

    def timed_out(self, why: str = "") -> TransferTimeoutError:
        """The time of the call is over."""
        elapsed = (time.monotonic() - self.started) * 1000
        return TransferTimeoutError(
            f"{self.where}: not complete after {elapsed:.0f} ms{why and f' ({why})'}; raise sync_kv_timeout, or see "
            "whether the peer is alive (check_link_status, links())",
            status_code=self.timeout_code,
        )

    def lost(self, reason: object) -> LinkFailedError:
        """The link went down under it."""
        text = f"{self.where}: the link went down: {reason}; call link_clusters again"
        return _caused(LinkFailedError(text), reason)

    def _cut_off(self, reason: str) -> LinkFailedError:
        """What moves the bytes is gone; the link as well, unless the peer closed no more than that."""
        if self.link.down_reason:
            return self.lost(reason)
        return LinkFailedError(
            f"{self.where}: the peer ended, or closed what moves the bytes: {reason}; retry if links() still shows "
            "the link, else call link_clusters again"
        )

    def stale(self, why: object) -> CacheNotExistError:
        """What it reads is not there any more."""
        text = f"{self.where}: {why}; register it there (again), then retry"
        return _caused(CacheNotExistError(text), why)

    def refused(self, code: int, text: str) -> LLMException:
        """The peer said no."""
        known = code_of(code)
        if known is LLMStatusCode.LLM_SUCCESS:
            known = LLMStatusCode.LLM_UNKNOWN_ERROR  # a refusal that names no reason
        if known is LLMStatusCode.LLM_ENGINE_FINALIZED:
            return _caused(
                self.lost("the peer was finalized"), Refusal(code, text)
            )  # not the caller's engine
        if known in (LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT, LLMStatusCode.LLM_TIMEOUT):
            known = self.timeout_code
        return _caused(error_of(known, f"{self.where}: {text}"), Refusal(code, text))

    def invalid(self, error: ParamInvalidError) -> ParamInvalidError:
        """A rule that needs both sides is broken."""
        return _caused(ParamInvalidError(f"{self.where}: {error}"), error)

    def failure(self, error: Stale | MoveError | LinkLost | TimeoutError | ProtocolError) -> LLMException:
        """The exception for what stopped it; caused by what the system reported, else by what stopped it."""
        return _caused(self._failure(error), error.__cause__ or error)

    def _failure(self, error: Stale | MoveError | LinkLost | TimeoutError | ProtocolError) -> LLMException:
        match error:
            case Stale():
                return self.lost(down) if (down := self.link.down_reason) else self.stale(error)
            case MoveError():
                return self._moved(error.fault)
            case LinkLost() | ProtocolError():
                return self.lost(error)
            case _:
                return self.timed_out()

    def _moved(self, fault: Fault) -> LLMException:
        match fault.kind:
            case FaultKind.TIMEOUT:
                return self.timed_out(fault.text)
            case FaultKind.REFUSED:
                return self.refused(fault.code, fault.text)
            case FaultKind.DESTINATION:
                text = f"{self.where}: destination memory cannot be written: {fault.text}; register writable memory"
                return ParamInvalidError(text)
            case FaultKind.SOURCE:
                text = f"{self.where}: the source cannot be read: {fault.text}; unregister before unmapping"
                return LLMException(text, status_code=LLMStatusCode.LLM_FAILED)
            case FaultKind.CHANNEL if fault.cause is not None and is_shortage(fault.cause):
                return OutOfMemoryError(
                    f"{self.where}: the bytes cannot be moved: {fault.text}; then call again"
                )
            case FaultKind.CHANNEL:
                return LinkFailedError(
                    f"{self.where}: the bytes cannot be moved: {fault.text}; see links(), and unlink_clusters before "
                    "link_clusters, which meets that peer anew"
                )
            case _:
                return self._cut_off(fault.text)


def _caused(error: E, cause: object) -> E:
    if isinstance(cause, BaseException):
        error.__cause__ = cause
    return error
