"""A LinkService in a process of its own: `python -m tests.support.link_peer ID [HEARTBEAT_MS TIMEOUT_MS]`.

Prints its port, then answers lines: "dial ID PORT" with the code's name, "drop ID" and "links" with the
number of links. Ends with its standard input.
"""

from __future__ import annotations

import subprocess
import sys
from types import TracebackType

from llm_datadist._link.seam import Address, Target
from tests.support.links import Engine


class LinkPeer:
    """The process, from outside."""

    def __init__(self, cluster_id: int, *options: int) -> None:
        command = [sys.executable, "-m", "tests.support.link_peer", str(cluster_id), *map(str, options)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.target = Target(cluster_id, Address("127.0.0.1", int(self.hear())))

    def say(self, line: str) -> None:
        stdin = self.process.stdin
        if stdin is None:
            raise RuntimeError("the process has no standard input")
        stdin.write(line + "\n")
        stdin.flush()

    def hear(self) -> str:
        stdout = self.process.stdout
        line = stdout.readline() if stdout is not None else ""
        if not line:
            raise EOFError("the process has ended")
        return line.strip()

    def ask(self, line: str) -> str:
        self.say(line)
        return self.hear()

    def __enter__(self) -> LinkPeer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def main() -> None:
    cluster_id, *options = map(int, sys.argv[1:])
    heartbeat_ms, link_timeout_ms = options or (1000, 30000)
    with Engine(cluster_id, heartbeat_ms=heartbeat_ms, link_timeout_ms=link_timeout_ms) as engine:
        print(engine.address.port, flush=True)
        for line in sys.stdin:
            verb, *numbers = line.split()
            if verb == "dial":
                target = Target(int(numbers[0]), Address("127.0.0.1", int(numbers[1])))
                answer = engine.service.dial([target], 3)[0].name
            else:
                link = engine.service.get(int(numbers[0])) if numbers else None
                if link is not None:
                    engine.service.drop(link, "asked to", tell=True)
                answer = str(len(engine.service.links()))
            print(answer, flush=True)


if __name__ == "__main__":
    main()
