"""A plan applied to a list of stages, in the order written here."""

from __future__ import annotations

from collections.abc import Callable

import paddle

from ppfleetx.config.sections import RunConfig
from ppfleetx.distributed.context import ParallelContext
from ppfleetx.models.staged import StagedModel
from ppfleetx.nn.stage import Stage
from ppfleetx.optims.build import build_optimizer
from ppfleetx.parallel.local import LocalRunner
from ppfleetx.parallel.runner import Runner

LossFunction = Callable[[paddle.nn.Layer, dict[str, paddle.Tensor]], tuple[paddle.Tensor, paddle.Tensor]]


def parallelize(
    stages: list[Stage], loss_fn: LossFunction, cfg: RunConfig, ctx: ParallelContext, *, train: bool
) -> Runner:
    """Build the model of ``stages`` under the plan of ``ctx`` and return who runs it.

    The order: stages -> container with plan-free initial weights -> optimizer -> runner.
    """
    model = StagedModel(stages, seed=cfg.Global.seed)
    named = [(parameter.info.name, parameter) for parameter in model.parameters()]
    optimizer = build_optimizer(cfg.Optimizer, named) if train else None
    clip = cfg.Optimizer.grad_clip
    return LocalRunner(
        model, loss_fn, optimizer, ctx, seed=cfg.Global.seed, clip_norm=clip.clip_norm if clip else 0.0
    )
