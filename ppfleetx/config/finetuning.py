"""Rules between sections for finetuning: the task, its data and the plan fit together."""

from __future__ import annotations

from collections.abc import Iterator

from ppfleetx.config.fields import RuleError
from ppfleetx.config.plan import AXES
from ppfleetx.config.registries import modules_that
from ppfleetx.config.sections.data import GLUE_OUTPUTS, DatasetConfig
from ppfleetx.config.sections.root import RunConfig


def glue_task(cfg: RunConfig) -> str | None:
    """GLUE task of the configuration; None when no section of Data names one."""
    return next((dataset.name for _, dataset in _datasets(cfg) if dataset.is_glue), None)


def num_outputs(cfg: RunConfig) -> int:
    """Outputs of the classification head: the configured number, else the task's."""
    return cfg.Model.num_classes or GLUE_OUTPUTS[glue_task(cfg)]


def finetuning_violations(cfg: RunConfig) -> Iterator[RuleError]:
    """What about finetuning contradicts itself in ``cfg``."""
    yield from _texts(cfg)
    if cfg.Engine.save_load.keep_best and not (cfg.Data.Eval is not None and cfg.Engine.eval_freq):
        yield RuleError(
            ("Engine.save_load.keep_best", "Engine.eval_freq"),
            "the best is found by evaluating: give Data.Eval, and Engine.eval_freq of at least 1",
        )
    if cfg.Model.task.classifies:
        yield from _task(cfg)
    yield from _plan(cfg)
    if cfg.Engine.save_load.keep_best == "metric" and not cfg.Model.task.has_metrics:
        yield RuleError(
            ("Engine.save_load.keep_best", "Model.module"),
            f"only {modules_that('has_metrics')} has a metric; "
            "causal language models can keep the best by loss",
        )


def _datasets(cfg: RunConfig) -> Iterator[tuple[str, DatasetConfig]]:
    for mode, section in cfg.Data.sections("Train", "Eval", "Test"):
        yield f"Data.{mode}.dataset", section.dataset


def _texts(cfg: RunConfig) -> Iterator[RuleError]:
    for key, dataset in _datasets(cfg):
        if dataset.is_glue and not cfg.Model.task.classifies:
            yield RuleError(
                (f"{key}.name", "Model.module"),
                f"a GLUE task is learnt by Model.module = {modules_that('classifies')}, "
                f"not by {cfg.Model.module}",
            )


def _task(cfg: RunConfig) -> Iterator[RuleError]:
    task, classes = glue_task(cfg), cfg.Model.num_classes
    for key, dataset in _datasets(cfg):
        if dataset.name != task:
            wanted = "a GLUE task" if task is None else f"the same task everywhere, here {task}"
            yield RuleError((f"{key}.name",), f"{cfg.Model.module} learns {wanted}")
    if task is None and classes is None:
        yield RuleError(("Model.num_classes",), "is needed where no section of Data names a GLUE task")
    if task is not None and classes not in (None, GLUE_OUTPUTS[task]):
        what = f"has {GLUE_OUTPUTS[task]} classes"
        if GLUE_OUTPUTS[task] == 1:
            what = "predicts a number: 1 output"
        yield RuleError(("Model.num_classes",), f"{task} {what}; null takes the task's own number")


def _plan(cfg: RunConfig) -> Iterator[RuleError]:
    for axis in cfg.Model.task.refused_axes:
        if getattr(cfg.plan, axis) > 1:
            yield RuleError(
                (f"Distributed.{axis}_degree", "Model.module"),
                f"{cfg.Model.module} runs under {_others(cfg)}; {axis} must be 1",
            )


def _others(cfg: RunConfig) -> str:
    *first, last = [axis for axis in AXES if axis not in cfg.Model.task.refused_axes]
    return f"{', '.join(first)} and {last}"
