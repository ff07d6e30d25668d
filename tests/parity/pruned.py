"""Pruning while training, under plans of every kind: what is compared, and the runs in ranks of a pool."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np

from ppfleetx.config.parallel_plan import ParallelPlan as Plan
from tests.parity import low_precision, training

TRAIN = "tests.parity.pruned:train"
_KEY = "Compress.Prune."
# Of 16 heads 2, 3 and 4 go before the second, third and fourth of five steps; of 64 units 11, 15 and 16.
_SCHEDULE = {
    f"{_KEY}enable": True,
    f"{_KEY}ratio": 0.25,
    f"{_KEY}begin_step": 0,
    f"{_KEY}end_step": 3,
    f"{_KEY}frequency": 1,
}
FORMS = {
    "along a schedule": _SCHEDULE,
    "once, by squares": {
        f"{_KEY}enable": True,
        f"{_KEY}ratio": 0.3,
        f"{_KEY}criterion": "l2_norm",
        "Model.use_recompute": True,
    },
}

PART = {"train": "tests.parity.pruned:train_part", "model": "llama", "extra": _SCHEDULE}
"""What :meth:`tests.parity.comparison.Comparison.train_part` is given of a pruned run."""

PLANS = [
    Plan(dp=2), Plan(mp=2), Plan(pp=2), Plan(sep=2), Plan(sharding=2), Plan(sharding=2, sharding_stage=2),
    Plan(sharding=2, sharding_stage=3), Plan(mp=2, sequence_parallel=True), Plan(pp=2, virtual_pp_degree=2),
    Plan(pp=2, pp_schedule="zb_h1"), Plan(sharding=2, sharding_stage=2, sharding_offload=True),
    Plan(mp=2, pp=2), Plan(mp=4), Plan(dp=2, sep=2), Plan(mp=2, sharding=2, sharding_stage=3),
    Plan(pp=2, sharding=2, sharding_stage=2), Plan(dp=2, mp=2, pp=2),
    Plan(mp=2, pp=2, sharding=2, sharding_stage=3, sequence_parallel=True),
]  # fmt: skip


def rows() -> list[tuple[Plan, str, str]]:
    """(plan, form, model): every plan with both forms, and models that take turns."""
    models = ("gpt", "llama", "mixed")
    return [
        (plan, form, models[(number + turn) % len(models) if plan.world_size <= 4 else turn])
        for turn, form in enumerate(FORMS)
        for number, plan in enumerate(PLANS)
    ]


def options(form: str) -> dict[str, Any]:
    """What :meth:`tests.parity.comparison.Comparison.run` is given beside plan, model and optimizer."""
    return {"train": TRAIN, "steps": training.STEPS, "extra": FORMS[form]}


def train(**arguments: Any) -> dict[str, Any]:
    """In a rank: ``tests.parity.training:train`` with pruning, as the engine calls it."""
    with _pruned(training):
        return training.train(**arguments)


def train_part(**arguments: Any) -> list[float]:
    """In a rank: ``tests.parity.training:train_part``, likewise."""
    with _pruned(training):
        return training.train_part(**arguments)


def train_in_16_bits(**arguments: Any) -> dict[str, Any]:
    """In a rank: ``tests.parity.low_precision:train``, likewise."""
    with _pruned(low_precision):
        return low_precision.train(**arguments)


@contextlib.contextmanager
def _pruned(module: Any) -> Iterator[None]:
    """Within the context, the steps of ``module`` prune, and the zeros are checked after each step."""
    from ppfleetx.compress.prune_in_training import PruningInTraining

    held: list[PruningInTraining] = []
    take_step = training.take_step

    def step_with_pruning(runner: Any, step: int, cfg: Any, ctx: Any, *rest: Any) -> Any:
        if not held:
            held.append(PruningInTraining(cfg, ctx, runner))
        held[0].before_step(step)
        before = _gone(runner, cfg.Model)
        output = take_step(runner, step, cfg, ctx, *rest)
        after = _gone(runner, cfg.Model)
        assert before.keys() == after.keys()
        assert all((after[key] == gone).all() for key, gone in before.items()), (
            "what was zero is not any more"
        )
        return output

    with mock.patch.object(module, "take_step", step_with_pruning):
        yield
        held[0].finish()


def _gone(runner: Any, model: Any) -> dict[str, np.ndarray]:
    """Which parts of each matrix on this rank are zero; their biases and optimizer states must be, too."""
    from ppfleetx.compress.prune import LAYER, parts_of

    tensors = {(name, ""): parameter for name, parameter in runner.named_parameters()}
    infos = {name: parameter.info for (name, _), parameter in tensors.items()}
    zeros: dict[str, dict[str, np.ndarray]] = {}
    for (name, state), tensor in (tensors | runner.optimizer_state()).items():
        found, info = LAYER.fullmatch(name), infos[name]
        parts = None if found is None else parts_of(found[2], info.global_shape, model)
        if parts is None or tuple(tensor.shape) != tuple(info.local_shape):
            continue
        values = np.moveaxis(tensor.astype("float32").numpy(), parts.axis, 0)
        each = (values == 0).reshape(info.local_shape[parts.axis] // parts.width, -1).all(axis=1)
        linear, _, kind = name.rpartition(".")
        zeros.setdefault(linear, {})[f"{kind}/{state}"] = each
    gone = {linear: found["weight/"] for linear, found in zeros.items() if "weight/" in found}
    for linear, found in zeros.items():  # a bias may have another owner than its weight
        for key, each in found.items():
            assert (each | ~gone.get(linear, False)).all(), f"{linear}.{key} is not zero"
    return gone
