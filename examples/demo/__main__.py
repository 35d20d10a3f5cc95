"""Answers a prompt with prefill in one process and decode in another: ``python -m examples.demo --help``."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from examples.demo.settings import Settings

_NEEDS = ("llm_datadist", "numpy", "gguf", "tokenizers", "jinja2", "rich")
_BAD_OPTION, _FAILED, _INTERRUPTED = 2, 1, 130


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(_BAD_OPTION, f"error: {message} (see --help)\n")


def _whole_number(least: int, most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        number = int(text)
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(f"{number} is not in {least}..{most}")
        return number

    parse.__name__ = "whole number"  # argparse shows it for text that is no number
    return parse


_TRANSPORTS = ("auto", "local", "shm", "tcp", "nixl")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser("python -m examples.demo", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("prompt", nargs="*", default=["What is the capital of France?"], help="the question")
    add("--max-tokens", type=_whole_number(1, 2048), default=64, metavar="N", help="of the answer (64)")
    add(
        "--transport",
        choices=("auto", "local", "shm", "tcp", "nixl"),
        default="auto",
        help="what moves the bytes (auto)",
    )
    add("--mode", choices=("managed", "accessible"), default="managed", help="who may be read (managed)")
    add("--layerwise", action="store_true", help="prefill pushes each layer while it computes the next")
    add("--corrupt", action="store_true", help="flip one byte of the KV: the check has to notice")
    add("--seed", type=_whole_number(0, 2**63), metavar="N", help="sample with this seed (greedy without)")
    add("--model", metavar="FILE", help="a Llama as .gguf (SmolLM2-135M-Instruct, fetched by pip)")
    add("--port", type=_whole_number(0, 65535), default=0, help="where prefill listens on 127.0.0.1 (any)")
    return parser


def _prompt(words: list[str], parser: argparse.ArgumentParser) -> str:
    prompt = " ".join(words)
    try:
        prompt.encode()
    except UnicodeEncodeError:
        parser.error("the prompt is not valid UTF-8")
    if not prompt.strip():
        parser.error("the prompt is empty")
    return prompt


def _run(arguments: argparse.Namespace, prompt: str) -> int:
    from examples.demo import report
    from examples.demo.driver import Processes
    from examples.llama.fetch import model_file

    model = Path(arguments.model).absolute() if arguments.model else model_file()
    settings = Settings(
        model=str(model),
        max_tokens=arguments.max_tokens,
        transport=arguments.transport,
        mode=arguments.mode,
        layerwise=arguments.layerwise,
        corrupt=arguments.corrupt,
        seed=arguments.seed,
        port=arguments.port,
    )
    with Processes() as processes:
        processes.start(settings, prompt)
        reports = processes.run()
    print()
    for label, text in report.lines(settings, reports["prefill"], reports["decode"]):
        print(f"{label:12}  {text}")
    return _FAILED if report.check(reports["prefill"], reports["decode"]) else 0


def main() -> int:
    """Runs the demo; returns the exit code."""
    parser = _parser()
    arguments = parser.parse_args()
    prompt = _prompt(arguments.prompt, parser)
    missing = [name for name in _NEEDS if find_spec(name) is None]
    if missing:
        print(
            f"error: {', '.join(missing)} not installed: use `make demo`, or pip install -e '.[demo]'",
            file=sys.stderr,
        )
        return _FAILED
    # A polite kill ends the children too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return _run(arguments, prompt)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return _INTERRUPTED
    except Exception as error:  # of ours: DemoError, FetchError; of the system: OSError
        text = " ".join(str(error).split()) or type(error).__name__
        print(f"error: {text}", file=sys.stderr)
        return _FAILED


if __name__ == "__main__":
    sys.exit(main())
