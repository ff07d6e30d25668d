"""Generators of the ranks of a job, saved and restored (called in every rank)."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tests.e2e.program import NANO

State = dict[str, Any]


def start(overrides: list[str], world: int) -> Any:
    """This rank's context under the plan of ``overrides``."""
    from ppfleetx.config.loader import load_config
    from ppfleetx.distributed.init import init_distributed

    return init_distributed(load_config(Path(NANO), overrides, world_size=world))


def draw() -> list[float]:
    """Numbers of Python's, NumPy's and Paddle's default generators, and of the tracker's stream if any."""
    import numpy as np
    import paddle
    from paddle.distributed.fleet.meta_parallel import get_rng_state_tracker

    numbers = [random.random(), np.random.rand(), paddle.rand([1]).item()]
    for name in get_rng_state_tracker().states_:
        with get_rng_state_tracker().rng_state(name):
            numbers.append(paddle.rand([1]).item())
    return numbers


def seed_differently(ctx: Any, number: int) -> None:
    """Every rank another history."""
    import numpy as np
    import paddle

    seed = 10 * number + ctx.rank
    random.seed(seed), np.random.seed(seed), paddle.seed(seed)
    for _ in range(ctx.rank):
        draw()


def saved(overrides: list[str], world: int) -> tuple[State, list[float]]:
    """What a checkpoint keeps, and the numbers this rank draws next."""
    from ppfleetx.checkpoint.rng import gather_rng_state

    ctx = start(overrides, world)
    seed_differently(ctx, 1)
    return gather_rng_state(ctx), draw()


def restored(overrides: list[str], world: int, state: State) -> tuple[bool, list[float]]:
    """Whether this rank got its own generators, and what they draw."""
    from ppfleetx.checkpoint.rng import restore_rng_state

    ctx = start(overrides, world)
    seed_differently(ctx, 2)
    return restore_rng_state(state, ctx), draw()
