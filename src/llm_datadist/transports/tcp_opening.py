"""Opens what long selectors name, on a thread beside the serving one, which would keep all others waiting.

Strategy: one at a time, in order; NumPy gives the GIL up meanwhile. The thread ends when there is nothing to do.
Threads: ``submit`` on the serving thread; what it is given runs on the other one, or here if there is none.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from llm_datadist._shortages import start_thread
from llm_datadist.status import OutOfMemoryError


class Opener:
    """Runs jobs one by one. None of them may raise."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: deque[Callable[[], None]] = deque()
        self._works = False

    def submit(self, job: Callable[[], None]) -> None:
        """Runs ``job`` soon."""
        with self._lock:
            self._jobs.append(job)
            if self._works:
                return
            self._works = True
        try:
            start_thread(self._work, "llm-datadist-open")
        except OutOfMemoryError:  # the system has no thread left
            self._work()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._jobs:
                    self._works = False
                    return
                job = self._jobs.popleft()
            job()
