"""What the system refuses for a while: threads, descriptors, memory. In words that help, and as an exception.

Invariants: no function here fails for want of what it speaks of. A thread that could not be started has left
nothing behind, so whoever asked for it may note it as started once ``start_thread`` has returned, not before.
Threads: all functions may be called from any thread.
"""

from __future__ import annotations

import errno
import functools
import resource
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from llm_datadist._waiting import Latch
from llm_datadist.status import LLMException, LLMStatusCode, OutOfMemoryError

_LOOK_S = 0.02  # whether a thread that has not begun is still there
_NO_MEMORY = (errno.ENOMEM, errno.ENOBUFS)
_SHORT = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOSPC, *_NO_MEMORY))  # ENOSPC: of epoll


def start_thread(target: Callable[[], None], name: str) -> threading.Thread:
    """A daemon thread that runs ``target``.

    Raises:
        OutOfMemoryError: The system gives none; see ``no_thread``.
    """
    begun = Latch()

    def run() -> None:
        begun.open()
        target()

    thread = _Thread(target=run, name=name, daemon=True)
    try:
        thread.start()
    except (RuntimeError, MemoryError) as error:
        raise no_thread(name) from error
    while not begun.wait(_LOOK_S):
        if thread.is_gone() and not begun.is_open:
            thread.forget()
            raise no_thread(name)
    return thread


class _Thread(threading.Thread):
    """One whose start ends also where there is no memory for its first steps.

    Such a thread dies without a word, and CPython waits for ever until it has begun (gh-140746). So ``start`` does not
    wait here, and what the new thread is given to run is seen to go: CPython drops it when the thread has ended.
    """

    def __init__(self, *, target: Callable[[], None], name: str, daemon: bool) -> None:
        super().__init__(target=target, name=name, daemon=daemon)
        self._started = _Begun()
        self._boot: weakref.ref[Callable[[], None]] | None = None

    @property
    def _bootstrap(self) -> Callable[[], None]:
        boot: Callable[[], None] = functools.partial(super()._bootstrap)  # type: ignore[misc]
        self._boot = weakref.ref(boot)
        return boot

    def is_gone(self) -> bool:
        """Whether it has ended, however far it came. Not before it was started."""
        return self._boot is not None and self._boot() is None

    def forget(self) -> None:
        """It is not in the list of those that are about to begin any more, which nobody else takes it from."""
        getattr(threading, "_limbo", {}).pop(self, None)


class _Begun:
    """In place of the event that ``Thread.start`` waits for: it does not wait."""

    def __init__(self) -> None:
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True

    def wait(self) -> None:
        """``start_thread`` does."""

    def _at_fork_reinit(self) -> None:
        """There is no lock in it."""


def no_thread(what: str) -> OutOfMemoryError:
    """The system refuses a thread for ``what``; the text has the limits."""
    return OutOfMemoryError(
        f"no thread can be started for {what}: a limit of threads or processes is reached: {thread_limits()}, then "
        "call again"
    )


def is_shortage(error: BaseException) -> bool:
    """Whether the same call may work a moment later, when others have given something back."""
    if isinstance(error, OSError):
        return error.errno in _SHORT
    return isinstance(error, (MemoryError, OutOfMemoryError))


def is_of_system(error: OSError) -> bool:
    """Whether the system has reported it, and not a signal handler: a TimeoutError of ``signal.alarm`` is one too."""
    return error.errno is not None


def reason_of(error: BaseException) -> str:
    """What the system said; where something has run out, its limit and what to do about it."""
    said = getattr(error, "strerror", None) or str(error) or type(error).__name__
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, MemoryError):
        number = errno.ENOMEM
    hint = hint_of(number)
    return f"{said}; {hint}" if hint else said


def hint_of(number: int | None) -> str:
    """The limit behind an errno, and what to do about it; "" for one that is no shortage."""
    if number == errno.EMFILE:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return (
            f"all {limit} descriptors that this process may have (RLIMIT_NOFILE) are in use: close some, or raise "
            "the limit (ulimit -n)"
        )
    if number == errno.ENFILE:
        return f"all files of the system (fs.file-max: {_text('/proc/sys/fs/file-max')}) are in use: raise it"
    if number == errno.ENOSPC:
        watches = _text("/proc/sys/fs/epoll/max_user_watches")
        return f"this user's watches (fs.epoll.max_user_watches: {watches}) are in use: raise it"
    if number in _NO_MEMORY:
        return (
            f"the system gives no more memory (RLIMIT_AS: {_limit(resource.RLIMIT_AS)}, vm.max_map_count: "
            f"{_text('/proc/sys/vm/max_map_count')}, the memory.max of the cgroup): free some, or raise the limit"
        )
    return ""


def failure_of(what: str, error: BaseException) -> LLMException:
    """The exception for a system error: LLM_OUT_OF_MEMORY for a shortage, LLM_FAILED for any other."""
    text = f"{what}: {reason_of(error)}"
    if is_shortage(error):
        return OutOfMemoryError(text)
    return LLMException(text, status_code=LLMStatusCode.LLM_FAILED)


@contextmanager
def named(what: str) -> Iterator[None]:
    """System errors within become exceptions of ours.

    Args:
        what: Was tried, and could not be done: how the text begins.

    Raises:
        LLMException: See ``failure_of``.
    """
    try:
        yield
    except (OSError, MemoryError) as error:
        raise failure_of(what, error) from error


def thread_limits() -> str:
    """What may be behind a thread that cannot be started, and what to do about it."""
    pids = "; ".join(_pids_limits()) or "none that is visible here"
    return (
        f"this process has {threading.active_count()} threads of Python, RLIMIT_NPROC (ulimit -u, of all processes "
        f"of the user) is {_limit(resource.RLIMIT_NPROC)}, pids.max of its cgroup {pids}, "
        f"kernel.threads-max {_text('/proc/sys/kernel/threads-max')}: end some, or raise the limit"
    )


def _pids_limits() -> Iterator[str]:
    for line in _text("/proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        root = Path("/sys/fs/cgroup", *([] if not controllers else [controllers]))
        if controllers in ("", "pids"):
            folder = str(root) + path.rstrip("/")
            most = _text(f"{folder}/pids.max")
            if most != _UNKNOWN:
                yield f"is {most}, {_text(f'{folder}/pids.current')} in use"


_UNKNOWN = "unknown"


def _text(path: str) -> str:
    with suppress(OSError, ValueError):
        return Path(path).read_text().strip()
    return _UNKNOWN


def _limit(which: int) -> str:
    soft = resource.getrlimit(which)[0]
    return "unlimited" if soft == resource.RLIM_INFINITY else str(soft)
