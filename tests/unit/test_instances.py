"""What a script forgot to finalize ends when it exits, in the process that made it and only there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import llm_datadist

PROGRAM = """
import os
from llm_datadist import _instances
class Owner:
    def __init__(self, name, error=None):
        self.name, self.error = name, error
    def finalize(self):
        print("finalized", self.name, flush=True)
        _instances.release(self)
        if self.error:
            raise self.error
_instances.claim(Owner("a", ValueError("x")), beside_others=False)
_instances.claim(Owner("b"), beside_others=True)
gone = Owner("c")
_instances.claim(gone, beside_others=True)
_instances.release(gone)
child = os.fork()
if child == 0:
    _instances.claim(Owner("of the child"), beside_others=False)
else:
    os.waitpid(child, 0)
"""


@pytest.mark.rule("3.15")
def test_exit_finalizes_what_is_left_once() -> None:
    env = {**os.environ, "PYTHONPATH": str(Path(llm_datadist.__file__).parents[1])}
    out = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=env, timeout=30)
    assert (out.returncode, out.stderr) == (0, "")
    assert out.stdout.splitlines() == ["finalized of the child", "finalized a", "finalized b"]
