"""Random streams that belong to a step, not to the history of the process.

Dropout of step n is a function of (seed, n, micro batch, data rank): whatever ran before, whether the run
was resumed, and how often evaluation happened in between do not change it. Paddle 3.3.1 cannot serialise
its CPU generator without pickle, and with this rule it need not be.
"""

from __future__ import annotations

import random
from hashlib import sha256

import numpy as np


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed that differs whenever any part differs (SHA-256 of the parts)."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(sha256(text.encode()).digest()[:8], "little") >> 1


def seed_step(seed: int, step: int, micro_batch: int, data_rank: int) -> None:
    """Put Paddle's default generator where dropout of this micro batch starts.

    Args:
        seed: ``Global.seed``.
        step: optimizer step, from 1.
        micro_batch: index within the step.
        data_rank: replicas draw different masks.
    """
    import paddle

    paddle.seed(derive_seed("dropout", seed, step, micro_batch, data_rank))


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and Paddle's default generators for whatever draws outside a step."""
    import paddle

    random.seed(seed)
    np.random.seed(derive_seed("numpy", seed) % 2**32)
    paddle.seed(derive_seed("paddle", seed))
