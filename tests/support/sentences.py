"""The sentences of a page of Markdown: its paragraphs, list entries and rows of tables, without code and headings."""

from __future__ import annotations

import re
from collections.abc import Iterator

_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_RULE = re.compile(r"\|[ :|-]+\|")
_END = re.compile(r"(?:(?<=[.?!])|(?<=[.?!]\*\*)) +(?=[A-Z`*\[\d])")


def sentences(page: str) -> list[str]:
    """Each once, in their order, with single spaces; a row of a table is one."""
    found: dict[str, None] = {}
    for paragraph in _paragraphs(_FENCE.sub("", page)):
        found.update(dict.fromkeys(_END.split(paragraph)))
    return [text.strip() for text in found if text.strip()]


def _paragraphs(page: str) -> Iterator[str]:
    for block in re.split(r"\n\s*\n", page):
        lines = [line.strip() for line in block.strip().splitlines()]
        if not lines or lines[0].startswith("#"):
            lines = lines[1:]
        if lines and lines[0].startswith("|"):
            yield from (_row(line) for line in lines if not _RULE.fullmatch(line))
        else:
            yield from re.split(r"\s+(?=[-*] )", " ".join(lines)) if lines else ()


def _row(line: str) -> str:
    # Never split further: a row says one thing, and ``sentences`` splits before capital letters only.
    return " / ".join(cell.strip() for cell in line.strip("|").split("|")).replace(". ", "; ")
