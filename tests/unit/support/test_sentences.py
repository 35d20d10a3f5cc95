"""What counts as a sentence of a page."""

from __future__ import annotations

from tests.support.sentences import sentences

PAGE = """# Title

One sentence, over
two lines. `Code` begins another: it goes on! **Bold.** 3 is the fifth.

```
No. Sentence.
```

| a | b |
|---|---|
| first. Second | `x` |

* an entry. Of a list
* another
One sentence, over two lines.
"""


def test_g10_sentences_of_a_page() -> None:
    assert sentences(PAGE) == [
        "One sentence, over two lines.",
        "`Code` begins another: it goes on!",
        "**Bold.**",
        "3 is the fifth.",
        "a / b",
        "first; Second / `x`",
        "* an entry.",
        "Of a list",
        "* another One sentence, over two lines.",
    ]
