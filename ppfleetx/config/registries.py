"""Every registry of the program, with what ships. ``docs/extending.md`` shows how to add to each.

A configuration is validated before Paddle is imported. So the parts that ship are named here as text and
imported when they are made, and what the configuration, the planner and the counts of parameters have to know
of a part stands beside its name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from ppfleetx.config.registry import Registry


@dataclass(frozen=True)
class CallbackTraits:
    """Where a callback runs.

    Attributes:
        ranks: ``main``: on rank 0 alone, who writes files. ``loss``: there, and on the rank that computes the
            loss of a pipeline, whose log shows it. ``all``: on every rank, which may then communicate.
    """

    ranks: Literal["main", "loss", "all"] = "main"


@dataclass(frozen=True)
class ModuleTraits:
    """What a task is, for whoever has to know before it is made.

    Attributes:
        trains: tools/train.py runs it.
        continues_text: its network gives scores of the next token: it can generate, be exported and served.
        classifies: it learns a GLUE task: its network ends in a head of ``Model.num_classes`` outputs instead
            of a vocabulary, and its answers are written to a file, those on Data.Test too.
        has_metrics: an evaluation gives numbers besides the loss; their mean may decide which checkpoint is
            the best (``Engine.save_load.keep_best: metric``).
        offline_evaluation: tools/eval.py measures section ``Offline_Eval`` with it.
        for_generation: the configuration is one for generating: ``Generation.max_dec_len`` must fit.
        refused_axes: axes of a plan that it does not run under, e.g. ``("pp", "sep")``.
        measure: makes what an evaluation adds up, as ``package.module:attribute`` or the function itself;
            called with ``(module, ctx, has_labels=...)``. None: the loss per token.
    """

    trains: bool = True
    continues_text: bool = True
    classifies: bool = False
    has_metrics: bool = False
    offline_evaluation: bool = False
    for_generation: bool = False
    refused_axes: tuple[str, ...] = ()
    measure: str | Callable[..., Any] | None = None


CALLBACKS: Registry[Callable[..., Any] | tuple[str, ...], CallbackTraits] = Registry(
    "a callback", "Engine.callbacks", CallbackTraits()
)
MODULES: Registry[Callable[..., Any], ModuleTraits] = Registry("a module", "Model.module", ModuleTraits())

_CALLBACKS = "ppfleetx.core.engine.callbacks"
CALLBACKS.register("progress", f"{_CALLBACKS}.progress:TrainProgress.of")
CALLBACKS.register("train_log", f"{_CALLBACKS}.train_log:TrainLog.of", traits=CallbackTraits(ranks="loss"))
CALLBACKS.register("metrics", f"{_CALLBACKS}.metrics:MetricsFile.of")
CALLBACKS.register("memory", f"{_CALLBACKS}.memory:MemoryLog.of")
CALLBACKS.register("visual_dl", f"{_CALLBACKS}.visual_dl:VisualDL.of")
CALLBACKS.register("profiler", f"{_CALLBACKS}.profiler:ProfilerCallback.of")
CALLBACKS.register("predictions", f"{_CALLBACKS}.predictions:Predictions.of")
# A tuple of names stands for those callbacks.
CALLBACKS.register(
    "default", ("progress", "train_log", "metrics", "memory", "visual_dl", "profiler", "predictions")
)

_MODULES = "ppfleetx.core.module"
MODULES.register("GPTModule", f"{_MODULES}.gpt:GPTModule")
MODULES.register(
    "GPTEvalModule",
    f"{_MODULES}.eval:GPTEvalModule",
    traits=ModuleTraits(trains=False, offline_evaluation=True),
)
# Generation runs the same network and never asks for its loss.
MODULES.register("GPTGenerationModule", f"{_MODULES}.gpt:GPTModule", traits=ModuleTraits(for_generation=True))
MODULES.register(
    "GPTFinetuneModule",
    f"{_MODULES}.finetune:GPTFinetuneModule",
    traits=ModuleTraits(
        continues_text=False,
        classifies=True,
        has_metrics=True,
        refused_axes=("pp", "sep"),
        measure="ppfleetx.core.engine.measure:Classification",
    ),
)


def modules_that(trait: str) -> str:
    """The modules with a trait, for messages: ``GPTModule, GPTGenerationModule``."""
    return ", ".join(name for name in MODULES.names() if getattr(MODULES.traits(name), trait))
