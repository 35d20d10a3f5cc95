"""Starts the two processes, listens to both, and sees to it that neither outlives the run."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from examples.demo.lines import Lines, Message, PeerGoneError
from examples.demo.settings import Settings

_ROOT = Path(__file__).parents[2]
_GRACE = 5.0
_LAST_WORDS_S = 0.3


class DemoError(Exception):
    """Why there is no answer, as one line."""


@dataclass(slots=True)
class Child:
    """One of the two processes."""

    name: str
    process: subprocess.Popen[bytes]
    control: Lines
    report: Message | None = None


@dataclass(slots=True)
class Processes:
    """Both processes; leaving the ``with`` block ends what is left of them."""

    children: list[Child] = field(default_factory=list)
    events: SimpleQueue[tuple[Child, Message | None]] = field(default_factory=SimpleQueue)

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:  # both have reported and end by themselves
            for child in self.children:
                try:
                    child.process.wait(_GRACE)
                except subprocess.TimeoutExpired:
                    child.process.kill()
        for child in self.children:
            child.process.kill()
            child.process.wait()

    def start(self, settings: Settings, prompt: str) -> None:
        """Starts prefill and decode, joined by a socket pair for the hand-off."""
        prefill_end, decode_end = socket.socketpair()
        with prefill_end, decode_end:
            self._start("prefill", settings, prefill_end, {"prompt": prompt})
            self._start("decode", settings, decode_end, {})

    def _start(self, name: str, settings: Settings, handoff: socket.socket, extra: Message) -> None:
        mine, theirs = socket.socketpair()
        with theirs:
            fds = (theirs.fileno(), handoff.fileno())
            process = subprocess.Popen(
                [sys.executable, "-m", f"examples.demo.{name}", *map(str, fds)],
                pass_fds=fds,
                env=_environment(),
                stdin=subprocess.DEVNULL,
                # A Ctrl-C at the terminal is for the driver alone; it ends both.
                start_new_session=True,
            )
        child = Child(name, process, Lines(mine))
        self.children.append(child)
        child.control.send({"settings": asdict(settings), **extra})
        Thread(target=self._listen, args=(child,), daemon=True).start()

    def _listen(self, child: Child) -> None:
        try:
            while True:
                self.events.put((child, child.control.receive()))
        except PeerGoneError:
            self.events.put((child, None))

    def run(self) -> dict[str, Message]:
        """Shows the loading and the answer as they come; returns what both report at the end."""
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("loading the model into both processes", total=None)
            loaded: dict[str, Message] = {}
            while not loaded or len(loaded) < 2 or any(m["done"] < m["total"] for m in loaded.values()):
                child, message = self._next()
                if message["event"] == "progress":
                    loaded[child.name] = message
                    total = 2 * message["total"]
                    bar.update(task, completed=sum(m["done"] for m in loaded.values()), total=total)
        while any(child.report is None for child in self.children):
            child, message = self._next()
            if message["event"] == "text":
                print(message["text"], end="", flush=True)
            elif message["event"] == "report":
                child.report = message
        print()
        return {child.name: child.report or {} for child in self.children}

    def _next(self) -> tuple[Child, Message]:
        """The next event of a process that is well; the end of one that has reported is none."""
        while True:
            child, message = self.events.get()
            if message is None and child.report is None:
                raise DemoError(self._ended_early(child))
            if message is not None:
                if message["event"] == "failed":
                    raise DemoError(self._failed(child, message))
                return child, message

    def _failed(self, child: Child, message: Message) -> str:
        """The cause: that the other process was killed, or what was said first, as each says it before it ends."""
        until = time.monotonic() + _LAST_WORDS_S
        while (left := until - time.monotonic()) > 0:
            try:
                other, event = self.events.get(timeout=left)
            except Empty:
                break
            if other is not child and other.report is None:
                if event is None:
                    return self._ended_early(other)
                if event["event"] == "failed":
                    child, message = min((child, message), (other, event), key=lambda told: told[1]["at"])
                    break
        return f"{child.name}: {' '.join(message['text'].split())}"

    def _ended_early(self, child: Child) -> str:
        try:
            code = child.process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            return f"the {child.name} process closed its line to the driver"
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"the {child.name} process {how} before it was done"


def _environment() -> dict[str, str]:
    """One BLAS thread each: two processes share the cores, and sums come out the same in both."""
    paths = [str(_ROOT), os.environ.get("PYTHONPATH", "")]
    threads = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {**os.environ, **threads, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
