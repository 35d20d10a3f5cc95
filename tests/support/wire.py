"""Objects between the test and its peers, as bytes of their own.

``Connection.send`` and ``recv`` export the memory of a ``BytesIO``; from 3.13 on, one that is collected with an error
that still refers to the exported memory is reported as an error itself.
"""

from __future__ import annotations

import pickle
from multiprocessing.connection import Connection
from typing import Any


def send(conn: Connection, value: Any) -> None:
    conn.send_bytes(pickle.dumps(value))


def receive(conn: Connection) -> Any:
    return pickle.loads(conn.recv_bytes())
