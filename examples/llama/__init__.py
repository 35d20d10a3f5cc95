"""A small Llama in NumPy with a paged KV cache."""

from examples.llama.generate import Sampler, decode, prefill
from examples.llama.model import Config, Llama, PagedCache
from examples.llama.tokenizer import TextStream, Tokenizer

__all__ = ["Config", "Llama", "PagedCache", "Sampler", "TextStream", "Tokenizer", "decode", "prefill"]
