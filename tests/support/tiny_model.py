"""A Llama of a few thousand weights in a GGUF file: everything the demo needs but sense."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

LAYERS, HEADS, KV_HEADS, HEAD_DIM, FEED_FORWARD = 4, 6, 2, 8, 64
WIDTH = HEADS * HEAD_DIM
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_characters() -> list[str]:
    """The 256 characters by which byte-level BPE writes bytes; printable ones stand for themselves."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in kept]
    table = {byte: chr(byte) for byte in kept} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [table[byte] for byte in range(256)]


def write(path: Path, seed: int = 1) -> Path:
    """Writes the file; the same seed gives the same file."""
    merges = ["Ġ t", "Ġt h", "Ġth e"]
    tokens = [*SPECIAL, *byte_characters(), *(merge.replace(" ", "") for merge in merges)]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(2048)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(merges)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    _add_weights(writer, len(tokens), np.random.default_rng(seed))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_weights(writer: gguf.GGUFWriter, vocabulary: int, rng: np.random.Generator) -> None:
    kv = KV_HEADS * HEAD_DIM
    matrices = {
        "attn_q": (WIDTH, WIDTH),
        "attn_k": (kv, WIDTH),
        "attn_v": (kv, WIDTH),
        "attn_output": (WIDTH, WIDTH),
        "ffn_gate": (FEED_FORWARD, WIDTH),
        "ffn_up": (FEED_FORWARD, WIDTH),
        "ffn_down": (WIDTH, FEED_FORWARD),
    }

    def add(name: str, shape: tuple[int, ...], around: float = 0.0) -> None:
        values = around + rng.standard_normal(shape) / np.sqrt(shape[-1])
        writer.add_tensor(name, values.astype(np.float32))

    add("token_embd.weight", (vocabulary, WIDTH))
    add("output_norm.weight", (WIDTH,), 1.0)
    for layer in range(LAYERS):
        for name, shape in matrices.items():
            add(f"blk.{layer}.{name}.weight", shape)
        for name in ("attn_norm", "ffn_norm"):
            add(f"blk.{layer}.{name}.weight", (WIDTH,), 1.0)
