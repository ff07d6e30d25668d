"""Generators of all ranks: each continues its own under the same plan, rank 0's under another."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import paddle
import pytest

from ppfleetx.checkpoint.rng import gather_rng_state, restore_rng_state
from ppfleetx.config.errors import CheckpointError
from ppfleetx.distributed.context import ParallelContext
from tests.e2e.program import NANO
from tests.helpers.ranks import Pools

CASES = "tests.checkpoint.test_rank_generators:"
MP, PP = ["Distributed.mp_degree=2"], ["Distributed.pp_degree=2"]


def test_each_rank_continues_its_own_under_the_same_plan(pools: Pools) -> None:
    results = pools(2).run(CASES + "saved", overrides=MP, world=2)
    state, drawn = results[0][0], [numbers for _, numbers in results]
    assert all(other == state for other, _ in results)
    assert len(drawn[0]) == 4, "Python, NumPy, Paddle, and the stream of tensor-parallel ranks"
    assert not set(drawn[0]) & set(drawn[1]), "the ranks have drawn differently"
    assert [entry["at"]["mp"] for entry in state["rng_of_ranks"]["ranks"]] == [0, 1]
    again = pools(2).run(CASES + "restored", overrides=MP, world=2, state=state)
    assert again == [[True, numbers] for numbers in drawn]


def test_all_ranks_continue_rank_0_under_another_plan(pools: Pools) -> None:
    results = pools(2).run(CASES + "saved", overrides=PP, world=2)
    state, first = results[0][0], results[0][1]
    again = pools(2).run(CASES + "restored", overrides=MP, world=2, state=state)
    assert [own for own, _ in again] == [False, False]
    assert [numbers[:3] for _, numbers in again] == [first[:3], first[:3]]
    assert again[0][1][3] != again[1][1][3], "the stream of what differs between tensor-parallel ranks"


def test_states_that_are_equal_are_kept_once() -> None:
    state = gather_rng_state(ParallelContext.single())
    (only,) = state["rng_of_ranks"]["ranks"]
    assert only == {"at": dict.fromkeys(("dp", "pp", "sharding", "sep", "mp"), 0), "differs": {}}


def test_checkpoints_without_generators_of_each_rank_are_read() -> None:
    """As written before there were any."""
    ctx = ParallelContext.single()
    state = gather_rng_state(ctx)
    numbers = draw()
    old = {"rng": {**state["rng"], "paddle": {**state["rng"]["paddle"]}}}
    del old["rng"]["paddle"]["tracker"]
    assert not restore_rng_state(old, ctx)
    assert draw()[:3] == numbers[:3]


def test_a_missing_rank_is_refused() -> None:
    ctx = ParallelContext.single()
    state = gather_rng_state(ctx)
    state["rng_of_ranks"]["ranks"] = []
    with pytest.raises(CheckpointError, match=r"generators of rank 0; set .*load_rng to False"):
        restore_rng_state(state, ctx)


def test_streams_of_an_earlier_run_in_the_process_are_passed_over() -> None:
    """A process that trained under tensor parallelism has a stream that this plan does not use."""
    ctx = ParallelContext.single()
    state = gather_rng_state(ctx)
    state["rng"]["paddle"]["tracker"]["left_behind"] = state["rng"]["paddle"]["default"]
    expected = draw()
    seed_differently(ctx, 3)
    assert restore_rng_state(state, ctx)
    assert draw()[:3] == expected[:3]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """The process sees so many GPUs. Each stands for the CPU's generator."""

    take, give_back = paddle.get_rng_state, paddle.set_rng_state

    def see(count: int) -> None:
        def set_states(states: list[object]) -> None:
            assert len(states) == count, "Paddle takes a state for each visible device"
            give_back(states[:1])

        monkeypatch.setattr(paddle.device, "get_device", lambda: "gpu:0")
        monkeypatch.setattr(paddle, "get_rng_state", lambda: take() * count)
        monkeypatch.setattr(paddle, "set_rng_state", set_states)

    return see


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (8, 1, "Paddle's of 8 gpus, this process sees 1 gpu;"),
        (2, 4, "Paddle's of 2 gpus, this process sees 4 gpus;"),
        (0, 2, "Paddle's of the cpu, this process sees 2 gpus;"),
        (4, 4, ""),
    ],
)
def test_other_devices_than_those_saved_are_said_and_passed_over(
    gpus: Callable[[int], None], caplog: pytest.LogCaptureFixture, before: int, after: int, words: str
) -> None:
    """Python's and NumPy's generators continue in any case."""
    ctx = ParallelContext.single()
    if before:
        gpus(before)
    state = gather_rng_state(ctx)
    expected = draw()
    gpus(after)
    seed_differently(ctx, 3)
    heard = mock.patch.object(logging.getLogger("ppfleetx"), "propagate", True)
    with caplog.at_level(logging.WARNING), heard:
        assert restore_rng_state(state, ctx)
    drawn = draw()
    assert drawn[:2] == expected[:2] and (drawn[2] == expected[2]) == (not words)
    assert len(caplog.messages) == bool(words) and words in "".join(caplog.messages)


# -- in the ranks

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
