"""The harness itself: what the integration tests rely on."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
import threading

import pytest

from llm_datadist.status import CacheNotExistError, LLMStatusCode
from llm_datadist.testing.stopwatch import Stopwatch
from tests.support import actors, leaks
from tests.support.memory import FILL, Mapping, pattern
from tests.support.peers import PeerDied
from tests.support.pool import Spawner
from tests.support.world import World, wait_until


def _fail(w: World) -> None:
    try:
        os.stat("/nowhere")
    except OSError as exc:
        raise CacheNotExistError("no cache 5", stale_blocks=[1, 2]) from exc


def _remember(w: World, value: int) -> int:
    w.extras["sum"] = w.extras.get("sum", 0) + value
    return int(w.extras["sum"])


def _block(w: World) -> None:
    threading.Event().wait(30)


def _leak(w: World) -> None:
    w.extras["fd"] = os.open("/dev/null", os.O_RDONLY)


def test_state_stays_between_calls(spawn: Spawner) -> None:
    peer = spawn()
    assert [peer.call(_remember, n) for n in (1, 2, 3)] == [1, 3, 6]


def test_an_exception_travels_with_class_code_text_and_cause(spawn: Spawner) -> None:
    outcome = spawn().attempt(_fail)
    outcome.expect(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, "no cache 5").raised(CacheNotExistError)
    assert isinstance(outcome.error, CacheNotExistError)
    assert outcome.error.stale_blocks == (1, 2)
    assert isinstance(outcome.error.__cause__, FileNotFoundError)


def test_calls_run_side_by_side_and_a_kill_ends_them(spawn: Spawner) -> None:
    peer = spawn()
    blocked = peer.start(_block)
    assert peer.call(_remember, 1) == 1
    peer.kill()
    with pytest.raises(PeerDied):
        blocked.result(5)


def test_a_stopped_peer_answers_only_after_cont(spawn: Spawner) -> None:
    peer = spawn()
    peer.call(_remember, 0)
    peer.stop()
    running = peer.start(_remember, 4)
    with pytest.raises(TimeoutError):
        running.outcome(0.2)
    peer.cont()
    assert running.result(5) == 4


def test_a_leak_in_a_peer_is_found() -> None:
    spawner = Spawner()
    spawner().call(_leak)
    (text,) = spawner.close()
    assert "/dev/null" in text


def test_a_leak_here_is_found() -> None:
    before = leaks.take()
    fd = os.open("/dev/null", os.O_RDONLY)
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="forgotten")
    thread.start()
    text = leaks.differences(before, 0.1)
    stop.set()
    thread.join()
    os.close(fd)
    assert "1 fds" in text
    assert "forgotten" in text


HOLD = """
import sys, tempfile
file = tempfile.NamedTemporaryFile(dir="/dev/shm")
print(file.name, flush=True)
sys.stdin.read()
"""
ELSEWHERE = "import os; os.fork() and os._exit(0)"


@pytest.mark.parametrize("elsewhere", [False, True])
def test_g11_shared_memory_of_processes_beside_this_one_is_no_leak_here(elsewhere: bool) -> None:
    """The machine has other users: the worker of pytest beside this one, a benchmark."""
    before = leaks.take()
    program = [sys.executable, "-c", (ELSEWHERE if elsewhere else "") + HOLD]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        path = process.stdout.readline().strip()
        text = leaks.differences(before, 0.1)
        assert (os.path.basename(path) in text) is not elsewhere
        process.stdin.close()
    assert wait_until(lambda: not os.path.exists(path))


def test_g11_shared_memory_that_nobody_holds_is_a_leak() -> None:
    before = leaks.take()
    with tempfile.NamedTemporaryFile(dir="/dev/shm", delete=False) as left:
        pass
    text = leaks.differences(before, 0.1)
    os.unlink(left.name)
    assert os.path.basename(left.name) in text


def test_compare_sees_a_wrong_byte_inside_and_outside(spawn: Spawner) -> None:
    peer = spawn()
    peer.call(actors.make, "dst", tensors=2, dim0=4, stride=16)
    assert peer.call(actors.unchanged, "dst") == ""
    peer.call(_copy_block, 0, 3)
    right = {"seed": 5, "src_tensor_nbytes": 64, "tensors": [(1, 0)]}
    assert peer.call(actors.compare, "dst", pieces=[([0], [48], 16)], **right) == ""
    assert "tensor 1 offset 48" in peer.call(actors.compare, "dst", pieces=[], **right)
    assert "tensor 1" in peer.call(actors.unchanged, "dst")


def _copy_block(w: World, src: int, dst: int) -> None:
    w.held["dst"].tensor(1)[dst * 16 : dst * 16 + 16] = pattern(5, 0, 64)[src * 16 : src * 16 + 16]


def test_patterns_differ_by_cache_tensor_and_offset() -> None:
    blocks = [pattern(seed, tensor, 8192).reshape(-1, 1024) for seed in (1, 2) for tensor in (0, 1)]
    assert len({row.tobytes() for block in blocks for row in block}) == 32


def test_a_mapping_can_come_back_at_the_same_address() -> None:
    address = 0x5100_0000_0000
    Mapping(4096, address).close()
    again = Mapping(8192, address)
    again.view(0, 8192)[:] = FILL
    assert again.address == address
    again.close()


def test_a_warm_peer_is_used_again(spawn: Spawner) -> None:
    watch = Stopwatch()
    pid = spawn().pid
    other = Spawner()
    mine = other()
    assert mine.pid != pid
    other.close()
    assert spawn().pid == mine.pid
    assert watch.within(10)


class _Unreadable:
    def __reduce__(self) -> tuple[object, ...]:
        return (int, ("not a number",))


def test_a_request_that_cannot_be_read_ends_the_peer(spawn: Spawner) -> None:
    running = spawn().start(_remember, _Unreadable())
    with pytest.raises(PeerDied):
        running.result(5)


def test_g20_a_call_that_failed_leaves_no_exported_memory(spawn: Spawner) -> None:
    """Collected together with its error: what the collector finds wrong then is an error of the test."""
    peer = spawn()
    peer.kill()
    with pytest.raises(PeerDied) as caught:
        peer.call(_remember, bytes(100))
    cycle: list[object] = [caught.value]
    cycle.append(cycle)
    del caught, cycle
    gc.collect()
