"""Byte-level BPE and the chat template, both as the model's file describes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import decoders, models, pre_tokenizers

_CONTROL = 3  # the token type of <|im_start|> and its like


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a GGUF file says about text."""

    tokens: Sequence[str]
    token_types: Sequence[int]
    merges: Sequence[str]
    chat_template: str
    end: int


class Tokenizer:
    """Text to tokens and back."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        ids = {token: i for i, token in enumerate(vocabulary.tokens)}
        pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in vocabulary.merges)]
        self._bpe = tokenizers.Tokenizer(models.BPE(vocab=ids, merges=pairs))
        # SmolLM2 splits numbers into digits before anything else; "Ġ" (a space) is never put in front.
        self._bpe.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        self._bpe.decoder = decoders.ByteLevel()
        kinds = zip(vocabulary.tokens, vocabulary.token_types, strict=True)
        self._bpe.add_special_tokens([token for token, kind in kinds if kind == _CONTROL])
        # The template comes with the file: it runs in a sandbox.
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        self._template = environment.from_string(vocabulary.chat_template)
        self.end = vocabulary.end

    def chat(self, question: str) -> list[int]:
        """The tokens of a conversation that has one question and waits for the answer."""
        messages = [{"role": "user", "content": question}]
        text = self._template.render(messages=messages, add_generation_prompt=True)
        ids: list[int] = self._bpe.encode(text, add_special_tokens=False).ids
        return ids

    def text(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones left out."""
        text: str = self._bpe.decode(list(tokens), skip_special_tokens=True)
        return text


class TextStream:
    """Text as its tokens come: a character appears once all its bytes are there."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._shown = ""

    def add(self, token: int) -> str:
        """What the token adds to the text, perhaps nothing yet."""
        self._tokens.append(token)
        text = self._tokenizer.text(self._tokens)
        if text.endswith("\N{REPLACEMENT CHARACTER}"):  # the middle of a character
            return ""
        added, self._shown = text[len(self._shown) :], text
        return added
