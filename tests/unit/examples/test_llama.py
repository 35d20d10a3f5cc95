"""The example model: right against a plain reading of the formulas, whatever way the KV is cut up."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gguf", reason="the extra demo is not installed")

from examples.llama import Llama, PagedCache, Sampler, TextStream, Tokenizer, decode, prefill
from examples.llama.gguf_file import ModelFileError, load
from tests.support import tiny_model

PROMPT = [5, 99, 42, 42, 7, 250, 3, 180, 11, 64, 8]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Llama, Tokenizer]:
    return load(tiny_model.write(tmp_path_factory.mktemp("model") / "tiny.gguf"))


@pytest.fixture
def model(loaded: tuple[Llama, Tokenizer]) -> Llama:
    return loaded[0]


@pytest.fixture
def tokenizer(loaded: tuple[Llama, Tokenizer]) -> Tokenizer:
    return loaded[1]


def plain_logits(model: Llama, tokens: list[int]) -> np.ndarray:
    """The same model token by token and head by head, in float64, without any cache."""
    c, weights = model.config, {name: w.astype(np.float64) for name, w in model._weights.items()}
    keys: dict[int, list[np.ndarray]] = {layer: [] for layer in range(c.layers)}
    values: dict[int, list[np.ndarray]] = {layer: [] for layer in range(c.layers)}

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean() + c.norm_eps) * weights[name + ".weight"]

    def turned(head: np.ndarray, position: int) -> np.ndarray:
        turned = head.copy()
        for i in range(0, c.head_dim, 2):
            angle = position * c.rope_base ** (-i / c.head_dim)
            turned[i] = head[i] * np.cos(angle) - head[i + 1] * np.sin(angle)
            turned[i + 1] = head[i] * np.sin(angle) + head[i + 1] * np.cos(angle)
        return turned

    for position, token in enumerate(tokens):
        x = weights["token_embd.weight"][token]
        for layer in range(c.layers):
            w = f"blk.{layer}."
            h = norm(x, w + "attn_norm")
            q, k, v = (
                (weights[w + name + ".weight"] @ h).reshape(-1, c.head_dim)
                for name in ("attn_q", "attn_k", "attn_v")
            )
            keys[layer].append(np.array([turned(head, position) for head in k]))
            values[layer].append(v)
            heads = []
            for i, head in enumerate(q):
                group = i // (c.heads // c.kv_heads)
                scores = [turned(head, position) @ k[group] / np.sqrt(c.head_dim) for k in keys[layer]]
                shares = np.exp(scores) / np.exp(scores).sum()
                heads.append(sum(share * v[group] for share, v in zip(shares, values[layer], strict=True)))
            x = x + weights[w + "attn_output.weight"] @ np.concatenate(heads)
            h = norm(x, w + "ffn_norm")
            gate = weights[w + "ffn_gate.weight"] @ h
            x = x + weights[w + "ffn_down.weight"] @ (
                gate / (1 + np.exp(-gate)) * (weights[w + "ffn_up.weight"] @ h)
            )
    return weights["token_embd.weight"] @ norm(x, "output_norm")


def test_logits_are_those_of_the_formulas(model: Llama) -> None:
    cache = PagedCache(model.config, 8, 4)
    logits = model.forward(PROMPT, 0, cache, cache.allocate(len(PROMPT)))
    np.testing.assert_allclose(logits, plain_logits(model, PROMPT), rtol=1e-4, atol=1e-4)


def test_token_by_token_gives_the_same_as_all_at_once(model: Llama) -> None:
    whole, steps = PagedCache(model.config, 8, 4), PagedCache(model.config, 9, 4)
    expected = model.forward(PROMPT, 0, whole, whole.allocate(len(PROMPT)))
    table = steps.allocate(len(PROMPT))
    for position, token in enumerate(PROMPT):
        logits = model.forward([token], position, steps, table)
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seed", [None, 3])
def test_an_answer_goes_on_exactly_in_another_cache_with_other_blocks(
    model: Llama, tokenizer: Tokenizer, seed: int | None
) -> None:
    sampler, count = Sampler(seed), 30
    alone = PagedCache(model.config, 20, 4)
    table = alone.allocate(len(PROMPT) + count)
    first = prefill(model, PROMPT, alone, table, sampler)
    expected = list(decode(model, first, len(PROMPT), alone, table, sampler, count, tokenizer.end))

    there, here = PagedCache(model.config, 11, 4), PagedCache(model.config, 33, 4)
    source, target = there.allocate(len(PROMPT)), here.allocate(len(PROMPT) + count)
    first = prefill(model, PROMPT, there, source, sampler)
    assert source != target[: len(source)]
    for src, dst in zip(there.tensors, here.tensors, strict=True):
        dst[target[: len(source)]] = src[source]
    answer = list(decode(model, first, len(PROMPT), here, target, sampler, count, tokenizer.end))
    assert answer == expected
    assert len(set(answer)) > 3


def test_a_layer_is_announced_when_its_kv_is_final(model: Llama) -> None:
    cache = PagedCache(model.config, 8, 4)
    table, seen = cache.allocate(len(PROMPT)), {}

    def note(layer: int) -> None:
        seen[layer] = [cache.tensors[2 * layer + i][table].copy() for i in (0, 1)]

    model.forward(PROMPT, 0, cache, table, note)
    assert list(seen) == list(range(model.config.layers))
    for layer, (k, v) in seen.items():
        np.testing.assert_array_equal(k, cache.tensors[2 * layer][table])
        np.testing.assert_array_equal(v, cache.tensors[2 * layer + 1][table])
        assert np.any(k) and np.any(v)


def test_a_seed_decides_the_tokens_and_a_position_its_own() -> None:
    logits = np.random.default_rng(1).standard_normal(300).astype(np.float32)
    chosen = [Sampler(1).choose(logits, position) for position in range(50)]
    assert chosen == [Sampler(1).choose(logits, position) for position in range(50)]
    assert chosen != [Sampler(2).choose(logits, position) for position in range(50)]
    assert len(set(chosen)) > 10
    assert set(chosen) <= set(np.argsort(-logits)[:40].tolist())
    assert Sampler().choose(logits, 0) == int(np.argmax(logits))


def test_the_answer_ends_at_the_end_token_or_at_the_limit(model: Llama) -> None:
    cache = PagedCache(model.config, 8, 4)
    table = cache.allocate(len(PROMPT) + 8)
    first = prefill(model, PROMPT, cache, table, Sampler())
    free = list(decode(model, first, len(PROMPT), cache, table, Sampler(), 8, end=-1))
    assert len(free) == 8
    end = next(token for token in free[1:] if token != first)
    ended = list(decode(model, first, len(PROMPT), cache, table, Sampler(), 8, end=end))
    assert ended == free[: free.index(end) + 1]
    assert list(decode(model, first, len(PROMPT), cache, table, Sampler(), 1, end=-1)) == [first]


def test_blocks_are_scattered_and_run_out_with_a_reason(model: Llama) -> None:
    cache = PagedCache(model.config, 8, 4)
    table = cache.allocate(29)
    assert len(set(table)) == 8
    assert any(b != a + 1 for a, b in pairwise(table))
    with pytest.raises(ValueError, match=r"5 tokens .* need 2 KV blocks of 4 tokens, 0 are free"):
        cache.allocate(5)
    cache.free(table)
    assert sorted(cache.allocate(32)) == list(range(8))


def test_text_survives_the_tokenizer(tokenizer: Tokenizer) -> None:
    text = "the 42 thé\n\t the\N{SMILING FACE WITH SUNGLASSES} end"
    tokens = tokenizer.chat(text)
    assert tokenizer.text(tokens) == f"user\n{text}\nassistant\n"
    assert tokens[0] == tiny_model.SPECIAL.index("<|im_start|>")
    assert len(tokens) < len(tokenizer.text(tokens).encode())  # " the" is one token


def test_a_character_is_shown_once_all_its_bytes_are_there(tokenizer: Tokenizer) -> None:
    stream, offset = TextStream(tokenizer), len(tiny_model.SPECIAL)
    shown = [stream.add(byte + offset) for byte in "a\N{SMILING FACE WITH SUNGLASSES}é!".encode()]
    assert shown == ["a", "", "", "", "\N{SMILING FACE WITH SUNGLASSES}", "", "é", "!"]


def test_a_file_that_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"nowhere\.gguf: No such file"):
        load(tmp_path / "nowhere.gguf")
    for content in (b"", b"text" * 1000, tiny_model.write(tmp_path / "whole.gguf").read_bytes()[:5000]):
        path = tmp_path / "damaged.gguf"
        path.write_bytes(content)
        with pytest.raises(ModelFileError, match=r"damaged\.gguf is not a Llama model"):
            load(path)
