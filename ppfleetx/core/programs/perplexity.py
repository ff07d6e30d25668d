"""exp of a mean loss."""

from __future__ import annotations

import math


def perplexity(loss: float) -> float:
    """``exp(loss)``; infinity where a float cannot hold it, NaN for NaN."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
