"""What importing costs, and what the distributions hold."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

_IMPORT = """
import json, os, sys, threading, time
fds = len(os.listdir("/proc/self/fd"))
read = []
class Environ(dict):
    def __getitem__(self, key): read.append(key); return super().__getitem__(key)
    def get(self, key, default=None): read.append(key); return super().get(key, default)
    def __contains__(self, key): read.append(key); return super().__contains__(key)
if {watch}:
    import numpy, msgspec
    os.environ = Environ(os.environ)
    os.getenv = os.environ.get
def waited():
    with open("/proc/self/schedstat") as file:  # for a processor, which others keep busy
        return int(file.read().split()[1]) / 1e9
began = time.perf_counter() - waited()
import llm_datadist
took = time.perf_counter() - waited() - began
for name in {names}:
    getattr(llm_datadist, name)
print(json.dumps(dict(
    took=took, fds=len(os.listdir("/proc/self/fd")) - fds, threads=threading.active_count(),
    torch="torch" in sys.modules, read=read, modules=sorted(m for m in sys.modules if "." not in m),
)))
"""


def _import(watch: bool = False, names: tuple[str, ...] = ()) -> dict[str, Any]:
    script = _IMPORT.replace("{watch}", str(watch)).replace("{names}", repr(names))
    command = [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r})\n{script}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.rule("1.12")
def test_p1_import_is_quick() -> None:
    """The best of 5: under 300 ms."""
    assert min(_import()["took"] for _ in range(5)) < 0.3


@pytest.mark.rule("1.9", "1.10", "1.11")
def test_p1_import_does_nothing_but_define_names() -> None:
    found = _import(watch=True)
    assert found["fds"] == 0
    assert found["threads"] == 1
    assert not found["torch"]
    assert not found["read"]


@pytest.mark.rule("1.11")
def test_p1_using_the_facade_needs_no_torch_either() -> None:
    found = _import(names=("LLMDataDist", "CacheManager", "LLMConfig"))
    assert found["fds"] == 0
    assert found["threads"] == 1
    assert not found["torch"]


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel made from a source distribution, as `make dist` makes it."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_wheel_holds_the_package_and_nothing_else(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    assert wheel.name.startswith("llm_datadist-0.1.0")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(next(n for n in names if n.endswith("/METADATA"))).decode()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"llm_datadist"}
    sources = {str(p.relative_to(ROOT / "src")) for p in (ROOT / "src").rglob("*.py")}
    assert sources | {"llm_datadist/py.typed"} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    needed = {line.split(":")[1].split(">")[0].strip() for line in _headers(metadata, "Requires-Dist")}
    assert needed == {"numpy", "msgspec"}
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Python: >=3.10" in metadata


def _headers(metadata: str, name: str) -> list[str]:
    """Header lines of the core; those of extras are conditional."""
    return [line for line in metadata.splitlines() if line.startswith(name) and "extra ==" not in line]


def test_the_source_distribution_holds_what_tests_need(dist: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    wanted = {"pyproject.toml", "Makefile", "README.md", "LICENSE", "CHANGELOG.md", "tests/conftest.py"}
    assert wanted <= names
    assert not [name for name in names if name.startswith((".venv", "dist/")) or "__pycache__" in name]


def _pythons() -> list[str]:
    """Every Python >= 3.10 of the machine that is found by its name, and this one."""
    named = [shutil.which(f"python3.{minor}") for minor in range(10, 15)]
    works = [p for p in named if p and subprocess.run([p, "-c", ""], capture_output=True).returncode == 0]
    return sorted({sys.executable, *works})


_BOTH_PULLS = """
import sys
from tests.support import actors
from tests.support.pair import Combo, P_ID, make_pair
from tests.support.pool import Spawner, close_idle
for backend in ("local", "tcp"):
    spawner = Spawner()
    pair = make_pair(spawner, Combo("B", backend)).up()
    pair.source(); pair.destination()
    pair.pull_blocks([1], [2]).ok()
    pair.blocks_right([1], [2])
    assert not spawner.close()
close_idle()
print("right")
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("python", _pythons())
def test_p1_the_wheel_works_in_every_environment(dist: Path, tmp_path: Path, python: str) -> None:
    (wheel,) = dist.glob("*.whl")
    clean = tmp_path / "clean"
    subprocess.run([python, "-m", "venv", str(clean)], check=True)
    pip = [str(clean / "bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, str(wheel)], check=True)
    shutil.copytree(ROOT / "tests", tmp_path / "tests")
    # The doubles of the harness name pytest for its skips only.
    (tmp_path / "pytest.py").write_text("def skip(reason):\n    raise SystemExit(reason)\n")
    plain = {"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path)}
    for extra in ({"HOME": str(tmp_path)}, {"LD_LIBRARY_PATH": ""}):
        command = [str(clean / "bin/python"), "-c", _BOTH_PULLS]
        done = subprocess.run(
            command, env={**plain, **extra}, cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout == "right\n"
