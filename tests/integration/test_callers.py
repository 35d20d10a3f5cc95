"""Existing callers run unchanged: programs in their style, in processes of their own (``callers/``)."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.callers import many_clusters, pools

ROOT = Path(__file__).resolve().parents[2]


class Program:
    """One caller; ends when its standard input does."""

    def __init__(self, name: str, *arguments: str, **environment: str) -> None:
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", f"tests.integration.callers.{name}", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            bufsize=1,
            env={**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1", **environment},
        )
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self._in, self._out, self._err = self._process.stdin, self._process.stdout, self._process.stderr

    def tell(self, line: str) -> None:
        self._in.write(line + "\n")

    def line(self) -> str:
        """Its next line; a program that ended says why."""
        if line := self._out.readline():
            return line.strip()
        raise AssertionError(f"the program ended: {self._err.read()}")

    def end(self) -> str:
        """Closes its input; its last line."""
        self._in.close()
        out, err = self._out.read(), self._err.read()  # not ``communicate``: lines may have been read ahead
        self._process.wait(20)
        assert self._process.returncode == 0, err
        assert "Traceback" not in err, err
        return out.strip().splitlines()[-1]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._in, self._out, self._err):
            with contextlib.suppress(BrokenPipeError):
                stream.close()


@pytest.fixture
def programs() -> Iterator[Any]:
    started: list[Program] = []

    def start(name: str, *arguments: str, **environment: str) -> Program:
        started.append(Program(name, *arguments, **environment))
        return started[-1]

    yield start
    for program in started:
        program.close()


@contextlib.contextmanager
def free_ports(count: int, distance: int = 1) -> Iterator[list[int]]:
    """Ports that nobody listens on, the same distance apart; they are free again inside."""
    for _ in range(50):
        with contextlib.ExitStack() as held:
            first = held.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            ports = [first + number * distance for number in range(count)]
            try:
                for port in ports[1:]:
                    held.enter_context(socket.create_server(("127.0.0.1", port)))
            except (OSError, OverflowError):
                continue
        yield ports
        return
    raise RuntimeError("no free ports")


def run_both(programs: Any, layout: str, workers: int, table: dict[str, Any], **environment: str) -> None:
    """Both sides, the decoder first: each waits for the other."""
    arguments = (layout, str(workers), json.dumps(table))
    decoder = programs("rank_table", "decoder", *arguments, **environment)
    prompt = programs("rank_table", "prompt", *arguments, **environment)
    assert [prompt.line(), decoder.line()] == ["linked", "linked"]
    assert decoder.line() == "pulled"
    assert [decoder.end(), prompt.end()] == ["closed", "closed"]


_REST = (("gqa", 32), ("mla", 1), ("sparse", 32))


@pytest.mark.parametrize(
    ("layout", "workers"),
    [
        ("gqa", 1),
        ("mla", 32),
        ("sparse", 1),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in _REST),
    ],
)
def test_caller_1_caches_under_model_ids_and_a_rank_table(programs: Any, layout: str, workers: int) -> None:
    with free_ports(2) as ports:
        devices = [
            {"device_id": str(rank), "device_ip": "127.0.0.1", "rank_id": str(rank), "listen_port": port}
            for rank, port in enumerate(ports)
        ]
        servers = [{"server_id": "127.0.0.1", "device": devices}]
        table = {"version": "1.2", "server_count": "1", "server_list": servers, "status": "completed"}
        run_both(programs, layout, workers, table)


@pytest.mark.rule("3.39")
def test_caller_2_lazy_links_and_options_in_place(programs: Any) -> None:
    prompt = programs("lazy_hixl", "prompt")
    decoder = programs("lazy_hixl", "decoder", prompt.line())
    assert decoder.line() == "pulled"
    assert [decoder.end(), prompt.end()] == ["closed", "closed"]


def test_caller_3_pools_of_an_older_caller(programs: Any) -> None:
    prompt = programs("pools", "prompt")
    decoder = programs("pools", "decoder", prompt.line())
    for request in range(pools.REQUESTS):
        assert prompt.line() == f"request {request}"
        if request >= 3:  # the pool is full by now: room comes only with a pull
            decoder.tell(str(request - 3))
            assert decoder.line() == f"pulled {request - 3}"
    assert decoder.end() == "closed"
    assert prompt.end() == "waited True"


@pytest.mark.rule("4.37")
def test_caller_4_links_forty_clusters_and_repeats_the_dead(programs: Any) -> None:
    servers = programs("servers")

    def started(number: int, port: int = 0) -> int:
        servers.tell(f"{many_clusters.FIRST_ID + number}:{port}")
        return int(servers.line())

    with free_ports(2) as free:
        dead = dict(zip((7, 31), free, strict=True))
        ports = [dead.get(number) or started(number) for number in range(40)]
        caller = programs("many_clusters", ",".join(map(str, ports)))
        assert caller.line() == "failed 107,131"
        for number, port in dead.items():
            assert started(number, port) == port
        caller.tell("again")
        assert caller.line() == "linked 40"
        assert [caller.end(), servers.end()] == ["closed", "closed"]


@pytest.mark.rule("4.60")
def test_caller_5_physical_device_ids_in_a_container(programs: Any) -> None:
    with free_ports(2, distance=3) as ports:
        devices = [{"device_id": "4", "rank_id": "0"}, {"device_id": "7", "rank_id": "1"}]
        table = {
            "server_list": [{"server_id": "pod-5f7c9", "device": devices}],
            "server_count": 1,
            "status": "completed",
        }
        environment = {"HCCL_IF_BASE_PORT": str(ports[0] - 4), "ASCEND_RT_VISIBLE_DEVICES": "4,7"}
        run_both(programs, "gqa", 4, table, **environment)
