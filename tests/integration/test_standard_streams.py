"""A process that began without standard streams, and opens them anew while its engine runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]
_SCRIPT = """
import os, sys, traceback
backend, closed, told = sys.argv[1], [int(fd) for fd in sys.argv[2]], int(sys.argv[3])
sys.stderr = os.fdopen(told, "w")
from llm_datadist import LLMClusterInfo, LLMDataDist, LLMRole
from tests.support import actors

for fd in closed:
    os.close(fd)
engine = LLMDataDist(LLMRole.MIX, 1)
engine.init(actors.options("B", backend, "127.0.0.1:0"))
assert [os.readlink(f"/proc/self/fd/{fd}") for fd in closed] == [os.devnull] * len(closed)
stream = os.memfd_create("a log")
for fd in closed:
    os.dup2(stream, fd)
assert engine.link_clusters([actors.cluster(1, engine.listen_address)], 5000)[0] == 0, engine.link_error(1)
engine.check_link_status(1)
engine.finalize()
assert [os.readlink(f"/proc/self/fd/{fd}") for fd in closed] == ["/memfd:a log (deleted)"] * len(closed)
"""


@pytest.mark.parametrize("backend", ["tcp", "local", "shm"])
@pytest.mark.parametrize("closed", ["012", "0", "2", "12"])
def test_no_descriptor_of_a_standard_stream_is_taken(backend: str, closed: str) -> None:
    ours, theirs = os.pipe()
    with os.fdopen(ours) as errors:
        done = subprocess.Popen(
            [sys.executable, "-c", _SCRIPT, backend, closed, str(theirs)], pass_fds=[theirs], cwd=_ROOT
        )
        os.close(theirs)
        text = errors.read()
        assert done.wait() == 0, text
