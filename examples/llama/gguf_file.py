"""Reads a Llama and its tokenizer out of one GGUF file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from examples.llama.model import Config, Floats, Llama
from examples.llama.tokenizer import Tokenizer, Vocabulary

Progress = Callable[[int, int], None]


class ModelFileError(Exception):
    """The file is not a model that this program can run."""


def load(path: Path, progress: Progress = lambda done, total: None) -> tuple[Llama, Tokenizer]:
    """Loads the model; the weights become float32 arrays.

    Args:
        path: The file.
        progress: Called with (tensors done, tensors in all) as they are dequantised.

    Raises:
        ModelFileError: The file is missing, damaged or of another kind.
    """
    with _reading(path):
        reader = gguf.GGUFReader(path)
        config, tokenizer = _config(reader), Tokenizer(_vocabulary(reader))
    weights: dict[str, Floats] = {}
    for tensor in reader.tensors:
        with _reading(path):
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
        weights[tensor.name] = values.astype(np.float32, copy=False)
        progress(len(weights), len(reader.tensors))
    return Llama(config, weights), tokenizer


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ModelFileError(f"cannot read the model file {path}: {error.strerror or error}") from error
    except Exception as error:  # whatever a damaged file makes the parser do
        reason = str(error) or type(error).__name__
        raise ModelFileError(f"{path} is not a Llama model in GGUF format: {reason}") from error


def _value(reader: gguf.GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    if field is None:
        raise ModelFileError(f"its metadata has no {key}")
    return field.contents()


def _config(reader: gguf.GGUFReader) -> Config:
    architecture = _value(reader, "general.architecture")
    if architecture != "llama":
        raise ModelFileError(f"its architecture is {architecture!r}")
    heads = _value(reader, "llama.attention.head_count")
    return Config(
        layers=_value(reader, "llama.block_count"),
        heads=heads,
        kv_heads=_value(reader, "llama.attention.head_count_kv"),
        head_dim=_value(reader, "llama.embedding_length") // heads,
        rope_base=_value(reader, "llama.rope.freq_base"),
        norm_eps=_value(reader, "llama.attention.layer_norm_rms_epsilon"),
        context=_value(reader, "llama.context_length"),
    )


def _vocabulary(reader: gguf.GGUFReader) -> Vocabulary:
    return Vocabulary(
        tokens=_value(reader, "tokenizer.ggml.tokens"),
        token_types=_value(reader, "tokenizer.ggml.token_type"),
        merges=_value(reader, "tokenizer.ggml.merges"),
        chat_template=_value(reader, "tokenizer.chat_template"),
        end=_value(reader, "tokenizer.ggml.eos_token_id"),
    )
