"""Descriptors 0 to 2 are the standard streams', also where those are closed.

The system gives the lowest number that is free. If that is one of these, whatever writes to a standard stream writes
into a connection, and a program that opens its streams anew (``dup2``, as daemons do) closes what was there before.
Threads: any.
"""

from __future__ import annotations

import os

from llm_datadist._shortages import is_shortage

_HIGHEST = 2  # of stderr


def occupy() -> None:
    """Opens those of them that are closed on /dev/null, for good: nobody knows when their owner comes back.

    Raises:
        OSError: There is no descriptor left.
    """
    try:
        while (fd := os.open(os.devnull, os.O_RDWR)) <= _HIGHEST:
            pass
        os.close(fd)
    except OSError as exc:
        if is_shortage(exc):
            raise  # else there is no such file here, and it goes without
