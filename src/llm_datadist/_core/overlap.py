"""Whether two plans of memory meet: a transfer within one process must not read what it writes."""

from __future__ import annotations

import numpy as np

from llm_datadist._core.segments import Extents


def overlaps(a: Extents, b: Extents) -> bool:
    """Whether any byte belongs to both. Precise, tensor pair by tensor pair, where their hulls meet."""
    if not a.nbytes or not b.nbytes:
        return False
    a_low, a_high = a.bases + a.offsets.min(), a.bases + (a.offsets + a.lengths).max()
    b_low, b_high = b.bases + b.offsets.min(), b.bases + (b.offsets + b.lengths).max()
    near = (a_low[:, None] < b_high) & (a_high[:, None] > b_low)
    b_order = np.argsort(b.offsets, kind="stable")
    b_starts, b_ends = b.offsets[b_order], (b.offsets + b.lengths)[b_order]
    for at, other in np.argwhere(near):
        starts, ends = a.bases[at] + a.offsets, a.bases[at] + a.offsets + a.lengths
        # The runs of b are disjoint, so the first one that ends after a run's start is the one to look at.
        first = np.searchsorted(b.bases[other] + b_ends, starts, side="right")
        inside = first < len(b_starts)
        if (b.bases[other] + b_starts[first[inside]] < ends[inside]).any():
            return True
    return False
