"""The names callers import, and what importing costs. Signatures: see ``golden.txt``."""

from __future__ import annotations

import os
import subprocess
import sys
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any

import pytest

import llm_datadist

NAMES = [
    "LLMDataDist",
    "LLMConfig",
    "LlmConfig",
    "LLMRole",
    "LLMClusterInfo",
    "CacheManager",
    "Cache",
    "KvCache",
    "CacheDesc",
    "CacheKey",
    "CacheKeyByIdAndIndex",
    "BlocksCacheKey",
    "Placement",
    "DataType",
    "RegisterMemStatus",
    "Memtype",
    "MemInfo",
    "CacheInfo",
    "PoolInfo",
    "LayerSynchronizer",
    "TransferConfig",
    "TransferWithCacheKeyConfig",
    "CacheTask",
    "LLMStatusCode",
    "LLMException",
    "Status",
    "ParamInvalidError",
    "CacheNotExistError",
    "NotLinkedError",
    "LinkFailedError",
    "TransferTimeoutError",
    "LinkBusyError",
    "OutOfMemoryError",
    "FeatureNotEnabledError",
    "EngineFinalizedError",
    "Notify",
    "LinkInfo",
    "CacheInfo",
    "PoolInfo",
]


@pytest.mark.rule("1.1", "1.2")
def test_public_names() -> None:
    assert set(NAMES) <= set(llm_datadist.__all__)
    assert set(llm_datadist.__all__) <= set(dir(llm_datadist))
    for name in llm_datadist.__all__:
        assert getattr(llm_datadist, name).__module__.startswith("llm_datadist")
    assert llm_datadist.LlmConfig is llm_datadist.LLMConfig
    assert llm_datadist.KvCache is llm_datadist.Cache
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = llm_datadist.Nothing


@pytest.mark.rule("1.13", "1.14", "1.15", "1.16")
def test_enum_values() -> None:
    def members(kind: Any) -> dict[str, Any]:
        return {member.name: member.value for member in kind}

    assert members(llm_datadist.LLMRole) == {"PROMPT": 1, "DECODER": 2, "MIX": 3}
    assert members(llm_datadist.Placement) == {"HOST": 0, "DEVICE": 1}
    assert members(llm_datadist.Memtype) == {"MEM_TYPE_DEVICE": 0, "MEM_TYPE_HOST": 1}
    assert members(llm_datadist.RegisterMemStatus) == {"OK": 0, "PREPARING": 1, "FAILED": 2}


@pytest.mark.rule("1.17")
def test_which_enums_are_numbers() -> None:
    for kind in (llm_datadist.LLMRole, llm_datadist.Placement):
        assert issubclass(kind, IntEnum)
    for other in (llm_datadist.Memtype, llm_datadist.RegisterMemStatus, llm_datadist.DataType):
        assert issubclass(other, Enum) and not issubclass(other, int)


PROBE = """
import os, sys, threading, time
fds = set(os.listdir("/proc/self/fd"))
environ = os.environ
class Watched(dict):
    def _seen(self, *a, **k): raise SystemExit("environment read")
    get = __getitem__ = __contains__ = _seen
import {before}
os.environ = Watched()
def waited():
    with open("/proc/self/schedstat") as file:  # for a processor, which others keep busy
        return int(file.read().split()[1]) / 1e9
started = time.perf_counter() - waited()
import llm_datadist
took = time.perf_counter() - waited() - started
os.environ = environ
print(took, threading.active_count(), set(os.listdir("/proc/self/fd")) == fds,
      sorted(m for m in ("numpy", "torch", "socket", "asyncio", "ctypes", "msgspec") if m in sys.modules))
"""


@pytest.mark.rule("1.9")
def test_p1_import_is_light() -> None:
    env = {**os.environ, "PYTHONPATH": str(Path(llm_datadist.__file__).parents[1])}
    took = []
    for _ in range(5):
        program = PROBE.format(before="concurrent.futures, logging, inspect")
        out = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=env
        )
        seconds, threads, same_fds, heavy = out.stdout.split(maxsplit=3)
        assert (threads, same_fds, heavy.strip()) == ("1", "True", "[]")
        took.append(float(seconds))
    assert min(took) < 0.3


AUDIT = """
import sys
import concurrent.futures, logging, inspect
seen = []
def watch(event, arguments):
    if event == "open" and str(arguments[0]).endswith((".py", ".pyc")):
        return
    if event == "open" or event.split(".")[0] in ("socket", "subprocess", "ctypes", "mmap", "fcntl"):
        seen.append((event, str(arguments[0])[:200]))
sys.addaudithook(watch)
{program}
watched = list(seen)
open("/dev/null").close()
assert seen != watched, "the hook sees nothing"
print(watched)
"""


@pytest.mark.rule("1.8")
@pytest.mark.parametrize(
    ("program", "quiet"), [("import llm_datadist", True), ("import socket; socket.socket().close()", False)]
)
def test_p1_importing_opens_nothing_but_modules(program: str, quiet: bool) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(llm_datadist.__file__).parents[1])}
    command = [sys.executable, "-B", "-c", AUDIT.format(program=program)]
    out = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert (out.stdout.strip() == "[]") is quiet, out.stdout
