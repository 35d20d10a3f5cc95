"""The demo with transport ``nixl``: the tokens of one process, in both modes, at once and layer by layer."""

from __future__ import annotations

import re

import pytest

from tests.integration import test_examples
from tests.integration.test_examples import PROMPT, Program, demo
from tests.support.nixl_pair import need_nixl

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

program, tiny, real_model = test_examples.program, test_examples.tiny, test_examples.real_model
IDENTICAL = "identical: the same prompt in one process gives the same"


@pytest.fixture(autouse=True)
def _nixl() -> None:
    need_nixl()


@pytest.mark.parametrize("mode", ["managed", "accessible"])
@pytest.mark.parametrize("how", [(), ("--layerwise",)], ids=["whole", "layerwise"])
def test_demo_gives_the_tokens_of_one_process(
    program: Program, tiny: str, mode: str, how: tuple[str, ...]
) -> None:
    options = ["--model", tiny, "--transport", "nixl", "--mode", mode, "--max-tokens", "40", *how]
    code, out, err = demo(program, *options, PROMPT * 3)
    assert code == 0, out + err
    assert IDENTICAL in out
    assert re.search(r"^transport +nixl$", out, re.MULTILINE)
    assert ("layer i had arrived before layer i+2" in out) == bool(how)


def test_demo_with_the_real_model(program: Program, real_model: str) -> None:
    code, out, err = demo(program, "--model", real_model, "--transport", "nixl", PROMPT)
    assert code == 0, out + err
    assert out.startswith("The capital of France is Paris.\n")
    assert IDENTICAL in out
