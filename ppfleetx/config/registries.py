"""All registries, with the built-in parts. ``docs/extending.md`` shows how to add to each.

A configuration is validated before Paddle is imported. So built-in parts are registered as text and imported
when they are used; facts that are needed earlier are traits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ppfleetx.config.fields import RuleError
from ppfleetx.config.registry import Registry


@dataclass(frozen=True)
class CallbackTraits:
    """Traits of a callback.

    Attributes:
        ranks: the ranks that the callback runs on. ``main``: only rank 0, which writes files. ``loss``: also
            the rank that computes a pipeline's loss, whose log shows the loss. ``all``: every rank, so that
            the callback may communicate.
    """

    ranks: Literal["main", "loss", "all"] = "main"


@dataclass(frozen=True)
class LoggerTraits:
    """Traits of a log writer.

    Attributes:
        package: the library that the writer imports, or None.
        extra: the extra of this program that installs the library.
        options: the option names that the writer accepts; None: it checks them itself when it is made.
        callback: the callback that writes, for a logger that is not a ``LogWriter``.
    """

    package: str | None = None
    extra: str | None = None
    options: tuple[str, ...] | None = None
    callback: str | None = None


@dataclass(frozen=True)
class ModuleTraits:
    """Traits of a task.

    Attributes:
        trains: whether ppfleetx train can run the task.
        continues_text: whether the network scores the next token, so that it can generate, and be exported
            and served.
        classifies: whether the task is a GLUE task: the network ends in a head of ``Model.num_classes``
            outputs instead of a vocabulary, and predictions, also for Data.Test, are written to a file.
        has_metrics: whether an evaluation computes metrics besides the loss. Their mean may choose the best
            checkpoint (``Engine.save_load.keep_best: metric``).
        offline_evaluation: whether ppfleetx eval uses the task for section ``Offline_Eval``.
        for_generation: whether configurations of the task are for generation, so that
            ``Generation.max_dec_len`` must fit.
        refused_axes: the axes of a plan that the task does not support, e.g. ``("pp", "sep")``.
        measure: deprecated, use ``BasicModule.evaluator``: a function, or its ``package.module:attribute``,
            that is called with ``(module, ctx, has_labels=...)`` and returns an evaluator.
    """

    trains: bool = True
    continues_text: bool = True
    classifies: bool = False
    has_metrics: bool = False
    offline_evaluation: bool = False
    for_generation: bool = False
    refused_axes: tuple[str, ...] = ()
    measure: str | Callable[..., Any] | None = None


@dataclass(frozen=True)
class ArchitectureTraits:
    """Traits of an architecture.

    Attributes:
        spec: a function, or ``package.module:attribute``, that makes the ``ModelSpec``
            (``ppfleetx/models/gpt/spec.py``) from the ``Model`` section; None: GPT's.
        metrics: the names of the metrics that the layers report (``ppfleetx/nn/aux_loss.py``).
        layer_shapes: deprecated, use ``spec``: a function that returns the parameters of one layer,
            ``{name: ParamSpec}`` or ``{name: global shape}``.
    """

    spec: str | Callable[[Any], Any] | None = None
    metrics: tuple[str, ...] = ()
    layer_shapes: str | Callable[[Any], Mapping[str, Any]] | None = None


@dataclass(frozen=True)
class NormTraits:
    """Traits of a norm.

    Attributes:
        parameters: the parameters of the norm, out of ``weight`` and ``bias``; each has the normalized width.
        zero_centered: whether the gain is ``1 + weight``.
    """

    parameters: tuple[str, ...] = ("weight",)
    zero_centered: bool = False


@dataclass(frozen=True)
class ActivationTraits:
    """Traits of an activation.

    Attributes:
        gated: whether the activation combines pairs of gate and up, so that the MLP's first linear is twice
            as wide.
    """

    gated: bool = False


@dataclass(frozen=True)
class PositionTraits:
    """Traits of a position encoding.

    Attributes:
        has_table: whether a learned table of ``Model.max_position_embeddings`` rows is added to the
            embeddings.
        rotates: whether attention rotates queries and keys, which needs an even head width.
        biases: whether attention scores get linear biases.
    """

    has_table: bool = False
    rotates: bool = False
    biases: bool = False


@dataclass(frozen=True)
class OptimizerTraits:
    """Traits of an optimizer.

    Attributes:
        states: the largest number of float32 tensors of the parameter's shape kept for each parameter.
        matrix_states: the same for the matrices of the blocks; None: ``states``.
        reads: the keys that the optimizer reads, out of beta1, beta2, epsilon and weight_decay of section
            ``Optimizer``.
        options: the names that it accepts in ``Optimizer.options``.
    """

    states: int = 1
    matrix_states: int | None = None
    reads: tuple[str, ...] = ("beta1", "beta2", "epsilon", "weight_decay")
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class ScheduleTraits:
    """Traits of a learning-rate schedule.

    Attributes:
        decays: whether the rate is ``min_lr`` after ``decay_steps``; otherwise the schedule has no end.
    """

    decays: bool = True


@dataclass(frozen=True)
class DatasetTraits:
    """Traits of a dataset.

    Attributes:
        kind: the kind of data. ``corpus``: samples are cut from token files, and Train repeats them in the
            dataset's own order. ``texts``: records of text files in one directory, encoded by
            ``Data.tokenizer``. ``own``: anything else; the dataset decides what ``input_dir`` and ``split``
            mean. Eval and Test of ``texts`` and ``own`` are read whole.
        shuffled: whether each pass over Train of ``texts`` and ``own`` has a random order, which takes 8
            bytes per sample; otherwise samples are read by ascending index.
        num_outputs: the number of classes of a GLUE task (1 if it predicts a number); None for everything
            else.
        options: the names that the dataset accepts in ``dataset.options``.
    """

    kind: Literal["corpus", "texts", "own"] = "own"
    shuffled: bool = True
    num_outputs: int | None = None
    options: tuple[str, ...] = ()


CALLBACKS: Registry[Callable[..., Any] | tuple[str, ...], CallbackTraits] = Registry(
    "a callback", "Engine.callbacks", CallbackTraits()
)
LOGGERS: Registry[Callable[..., Any], LoggerTraits] = Registry(
    "a log writer", "Engine.loggers", LoggerTraits()
)
MODULES: Registry[Callable[..., Any], ModuleTraits] = Registry("a module", "Model.module", ModuleTraits())
ARCHITECTURES: Registry[Callable[..., Any], ArchitectureTraits] = Registry(
    "an architecture", "Model.name", ArchitectureTraits()
)
NORMS: Registry[Callable[..., Any], NormTraits] = Registry("a norm", "Model.normalization", NormTraits())
ACTIVATIONS: Registry[Callable[..., Any], ActivationTraits] = Registry(
    "an activation", "Model.hidden_act", ActivationTraits()
)
POSITIONS: Registry[Callable[..., Any], PositionTraits] = Registry(
    "a position embedding", "Model.position_embedding_type", PositionTraits()
)
OPTIMIZERS: Registry[Callable[..., Any], OptimizerTraits] = Registry(
    "an optimizer", "Optimizer.name", OptimizerTraits()
)
SCHEDULES: Registry[Callable[..., float], ScheduleTraits] = Registry(
    "a learning-rate schedule", "Optimizer.lr.decay_style", ScheduleTraits()
)
DATASETS: Registry[Callable[..., Any], DatasetTraits] = Registry(
    "a data set", "Data.Train.dataset.name", DatasetTraits()
)
TOKENIZERS: Registry[Callable[..., Any], None] = Registry("a tokenizer", "Data.tokenizer.name", None)

_CALLBACKS = "ppfleetx.core.engine.callbacks"
CALLBACKS.register("progress", f"{_CALLBACKS}.log_lines:TrainProgress.of")
CALLBACKS.register("train_log", f"{_CALLBACKS}.log_lines:TrainLog.of", traits=CallbackTraits(ranks="loss"))
CALLBACKS.register("metrics", f"{_CALLBACKS}.records:MetricsFile.of")
CALLBACKS.register("memory", f"{_CALLBACKS}.device_usage:MemoryLog.of")
CALLBACKS.register("forecast", f"{_CALLBACKS}.device_usage:Forecast.of")
CALLBACKS.register("visual_dl", f"{_CALLBACKS}.records:LogWriters.visual_dl")
CALLBACKS.register("profiler", f"{_CALLBACKS}.profiler:ProfilerCallback.of")
CALLBACKS.register("predictions", "ppfleetx.core.module.finetune:Predictions.of")
# Log lines of other toolkits, for programs that read them.
CALLBACKS.register(
    "megatron_log", f"{_CALLBACKS}.log_lines:MegatronLog.of", traits=CallbackTraits(ranks="loss")
)
CALLBACKS.register(
    "mindspeed_log", f"{_CALLBACKS}.log_lines:MindSpeedLog.of", traits=CallbackTraits(ranks="loss")
)
# A tuple of names stands for these callbacks.
CALLBACKS.register(
    "default",
    ("progress", "train_log", "metrics", "memory", "forecast", "visual_dl", "profiler", "predictions"),
)

_LOGGERS = "ppfleetx.core.loggers"
LOGGERS.register(
    "jsonl", f"{_CALLBACKS}.records:MetricsFile.of", traits=LoggerTraits(options=(), callback="metrics")
)
LOGGERS.register(
    "tensorboard",
    f"{_LOGGERS}.files:TensorBoard",
    traits=LoggerTraits("tensorboardX", "tensorboard", ("dir",)),
)
LOGGERS.register(
    "wandb",
    f"{_LOGGERS}.services:Wandb",
    traits=LoggerTraits("wandb", "wandb", ("project", "name", "entity", "group", "mode", "dir")),
)
LOGGERS.register("visualdl", f"{_LOGGERS}.files:VisualDL", traits=LoggerTraits("visualdl", "vdl", ("dir",)))
LOGGERS.register("csv", f"{_LOGGERS}.files:CsvFile", traits=LoggerTraits(options=()))
LOGGERS.register(
    "mlflow",
    f"{_LOGGERS}.services:MLflow",
    traits=LoggerTraits("mlflow", "mlflow", ("uri", "experiment", "name")),
)

_MODULES = "ppfleetx.core.module"
MODULES.register("GPTModule", f"{_MODULES}.gpt:GPTModule")
MODULES.register(
    "GPTEvalModule",
    f"{_MODULES}.gpt:GPTEvalModule",
    traits=ModuleTraits(trains=False, offline_evaluation=True),
)
# Generation runs the same network and never uses its loss.
MODULES.register("GPTGenerationModule", f"{_MODULES}.gpt:GPTModule", traits=ModuleTraits(for_generation=True))
MODULES.register(
    "GPTFinetuneModule",
    f"{_MODULES}.finetune:GPTFinetuneModule",
    traits=ModuleTraits(
        continues_text=False,
        classifies=True,
        has_metrics=True,
        refused_axes=("pp", "sep"),
    ),
)

_GPT = "ppfleetx.models.gpt"
ARCHITECTURES.register("GPT", f"{_GPT}.stages:gpt_stages")

NORMS.register("LayerNorm", "ppfleetx.nn.norm:LayerNorm", traits=NormTraits(parameters=("weight", "bias")))
NORMS.register("RMSNorm", "ppfleetx.nn.norm:RMSNorm")
NORMS.register("LayerNormNoBias", "ppfleetx.nn.norm:LayerNormNoBias")
NORMS.register(
    "LayerNorm1P",
    "ppfleetx.nn.norm:LayerNorm1P",
    traits=NormTraits(parameters=("weight", "bias"), zero_centered=True),
)
NORMS.register("RMSNorm1P", "ppfleetx.nn.norm:RMSNorm1P", traits=NormTraits(zero_centered=True))

ACTIVATIONS.register("gelu", "ppfleetx.nn.mlp:gelu_tanh")
ACTIVATIONS.register("gelu_exact", "paddle.nn.functional:gelu")
ACTIVATIONS.register("quick_gelu", "ppfleetx.nn.mlp:quick_gelu")
ACTIVATIONS.register("relu", "ppfleetx.nn.mlp:relu")
ACTIVATIONS.register("relu2", "ppfleetx.nn.mlp:relu_squared")
ACTIVATIONS.register("swiglu", "ppfleetx.nn.mlp:swiglu", traits=ActivationTraits(gated=True))
ACTIVATIONS.register("geglu_tanh", "ppfleetx.nn.mlp:geglu_tanh", traits=ActivationTraits(gated=True))

_POSITIONS = "ppfleetx.nn.positions"

POSITIONS.register(
    "learned_absolute", f"{_POSITIONS}:learned_absolute", traits=PositionTraits(has_table=True)
)
POSITIONS.register("rope", f"{_POSITIONS}:rope", traits=PositionTraits(rotates=True))
POSITIONS.register("alibi", f"{_POSITIONS}:alibi", traits=PositionTraits(biases=True))
POSITIONS.register("none", f"{_POSITIONS}:none")

OPTIMIZERS.register("AdamW", "ppfleetx.optims.adamw:AdamW", traits=OptimizerTraits(states=2))
OPTIMIZERS.register("Muon", "ppfleetx.optims.muon:muon", traits=OptimizerTraits(states=2, matrix_states=1))
OPTIMIZERS.register("SGD", "ppfleetx.optims.rule:SGD", traits=OptimizerTraits(states=0, reads=()))

_SCHEDULES = "ppfleetx.optims.schedules"
SCHEDULES.register("cosine", f"{_SCHEDULES}:cosine")
SCHEDULES.register("linear", f"{_SCHEDULES}:linear")
SCHEDULES.register("constant", f"{_SCHEDULES}:constant", traits=ScheduleTraits(decays=False))
SCHEDULES.register("inverse_square_root", f"{_SCHEDULES}:inverse_square_root")
SCHEDULES.register("wsd", f"{_SCHEDULES}:wsd")

_DATA = "ppfleetx.data.build"
DATASETS.register("GPTDataset", f"{_DATA}:gpt_dataset", traits=DatasetTraits("corpus"))
DATASETS.register("PromptResponseDataset", f"{_DATA}:prompt_response", traits=DatasetTraits("texts"))
DATASETS.register("ChatDataset", f"{_DATA}:chats", traits=DatasetTraits("texts", options=("chat_template",)))
for _task, _outputs in {
    "CoLA": 2,
    "SST2": 2,
    "MRPC": 2,
    "QQP": 2,
    "STSB": 1,
    "MNLI": 3,
    "QNLI": 2,
    "RTE": 2,
    "WNLI": 2,
}.items():
    DATASETS.register(_task, f"{_DATA}:glue", traits=DatasetTraits("texts", num_outputs=_outputs))

TOKENIZERS.register("BPE", "ppfleetx.data.tokenizer.tokenizer:from_section")


def modules_that(trait: str) -> str:
    """List the modules that have a trait, for messages: ``GPTModule, GPTGenerationModule``."""
    return ", ".join(name for name in MODULES.names() if getattr(MODULES.traits(name), trait))


def unknown_options(name: str, options: Mapping[str, Any], takes: tuple[str, ...]) -> Iterator[RuleError]:
    """Yield an error for each option that is not in ``takes``, the options that the part ``name`` accepts."""
    for option in options:
        if option not in takes:
            listed = f"it takes {', '.join(takes)}" if takes else "it takes none"
            yield RuleError(("options", "name"), f"{name} has no option {option}; {listed}")
