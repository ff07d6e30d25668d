"""The registries of the parts that a configuration names (optimizers, datasets, norms, ...).

Traits are the properties of a part that must be known before Paddle is imported. ``docs/extending.md`` shows
how to add parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ppfleetx.config.errors import ConfigError, RuleError
from ppfleetx.config.registry import Registry


@dataclass(frozen=True)
class CallbackTraits:
    """What must be known about a callback of the training loop before it is imported.

    Attributes:
        ranks: the ranks that run the callback. ``main`` is rank 0 alone, ``loss`` is rank 0 and a rank that
            computes the loss, and ``all`` is every rank.
    """

    ranks: Literal["main", "loss", "all"] = "main"


@dataclass(frozen=True)
class LoggerTraits:
    """What must be known about a writer of metrics (such as TensorBoard's) before it is imported.

    Attributes:
        package: the library that the writer imports, or None.
        extra: the pip extra of ppfleetx that installs the library.
        options: the names of the writer's options, whose values are strings; None: the writer itself checks
            its options.
        callback: the name in :data:`CALLBACKS` of a writer that is a callback; None if the writer is a
            ``LogWriter``.
    """

    package: str | None = None
    extra: str | None = None
    options: tuple[str, ...] | None = None
    callback: str | None = None


@dataclass(frozen=True)
class ModuleTraits:
    """What must be known about a task (``Model.module``) before its code is imported.

    Attributes:
        trains: whether ``ppfleetx train`` can run the task.
        continues_text: whether the network scores the next token, so it can generate, be exported and served.
        classifies: whether the task is a GLUE task, with a head of ``Model.num_classes`` outputs.
        has_metrics: whether an evaluation computes metrics besides the loss.
        offline_evaluation: whether ``ppfleetx eval`` uses the task for section ``Offline_Eval``.
        for_generation: whether the task generates text, so ``Generation.max_dec_len`` is checked.
        refused_axes: the axes of a parallel plan that the task does not support, e.g. ``("pp", "sep")``.
        measure: deprecated, use ``BasicModule.evaluator``. A function that is called with ``(module, ctx,
            has_labels=...)`` and returns an evaluator, or the string ``package.module:attribute`` that names
            the function.
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
    """What must be known about a network architecture (``Model.name``) before it is imported.

    Attributes:
        spec: a function that makes the ``ModelSpec`` from the section ``Model``, or the string
            ``package.module:attribute`` that names the function; None: GPT's function.
        metrics: the names of the metrics that the layers report (``ppfleetx/nn/aux_loss.py``).
        layer_shapes: deprecated, use ``spec``: a function that returns the parameters of one layer.
    """

    spec: str | Callable[[Any], Any] | None = None
    metrics: tuple[str, ...] = ()
    layer_shapes: str | Callable[[Any], Mapping[str, Any]] | None = None


@dataclass(frozen=True)
class NormTraits:
    """What must be known about a normalization layer before it is imported.

    Attributes:
        parameters: which of ``weight`` and ``bias`` the norm has.
        zero_centered: whether the gain is ``1 + weight``.
    """

    parameters: tuple[str, ...] = ("weight",)
    zero_centered: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.parameters, str) or not {*self.parameters} <= {"weight", "bias"}:
            raise ConfigError(
                f"NormTraits(parameters={self.parameters!r}): must be a tuple with the names 'weight' and "
                "'bias', or one of them, or none. A norm has no other parameters"
            )


@dataclass(frozen=True)
class ActivationTraits:
    """What must be known about an activation function before it is imported.

    Attributes:
        gated: whether it has a gate, as SwiGLU does. The MLP's first linear layer is then twice as wide.
    """

    gated: bool = False


@dataclass(frozen=True)
class PositionTraits:
    """What must be known about a position encoding before it is imported.

    Attributes:
        has_table: whether a learned table of ``Model.max_position_embeddings`` rows is added to the input.
        rotates: whether attention rotates queries and keys (RoPE).
        biases: whether attention scores get biases that are linear in the distance (ALiBi).
    """

    has_table: bool = False
    rotates: bool = False
    biases: bool = False


@dataclass(frozen=True)
class OptimizerTraits:
    """What must be known about an optimizer before it is imported.

    Attributes:
        states: the number of float32 states per parameter, such as 2 for AdamW.
        matrix_states: the number of float32 states per element of the weight matrices in the transformer
            blocks; None: ``states``.
        reads: which of the keys beta1, beta2, epsilon and weight_decay in section ``Optimizer`` it uses.
        options: the names that it accepts in ``Optimizer.options``.
        needs_whole_matrices: whether one of its rules updates whole matrices (``Rule.needs_whole``), which
            excludes some plans.
    """

    states: int = 1
    matrix_states: int | None = None
    reads: tuple[str, ...] = ("beta1", "beta2", "epsilon", "weight_decay")
    options: tuple[str, ...] = ()
    needs_whole_matrices: bool = False


@dataclass(frozen=True)
class ScheduleTraits:
    """What must be known about a learning-rate schedule before it is imported.

    Attributes:
        decays: whether the rate falls to ``min_lr`` at ``decay_steps``; False: the schedule has no end.
    """

    decays: bool = True


@dataclass(frozen=True)
class DatasetTraits:
    """What must be known about a dataset class before it is imported.

    Attributes:
        kind: ``corpus`` if samples are cut from files of token ids, ``texts`` if they are records of text
            files, ``own`` for anything else. Evaluation reads a configured number of batches of a ``corpus``,
            and all samples of the other kinds.
        shuffled: for ``texts`` and ``own``, whether each pass over the training data has a new random order.
        num_outputs: the number of classes of a GLUE task (1 if it predicts a number), otherwise None.
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
CALLBACKS.register("metrics", f"{_CALLBACKS}.metrics:MetricsFile.of")
CALLBACKS.register("memory", f"{_CALLBACKS}.device_usage:MemoryLog.of")
CALLBACKS.register("forecast", f"{_CALLBACKS}.device_usage:Forecast.of")
CALLBACKS.register("visual_dl", f"{_CALLBACKS}.metrics:LogWriters.visual_dl")
CALLBACKS.register("profiler", f"{_CALLBACKS}.profiler:ProfilerCallback.of")
CALLBACKS.register("predictions", "ppfleetx.core.module.classification:Predictions.of")
# Log lines in the formats of other toolkits, for programs that parse them.
CALLBACKS.register(
    "megatron_log", f"{_CALLBACKS}.log_lines:MegatronLog.of", traits=CallbackTraits(ranks="loss")
)
CALLBACKS.register(
    "mindspeed_log", f"{_CALLBACKS}.log_lines:MindSpeedLog.of", traits=CallbackTraits(ranks="loss")
)
# The name "default" stands for all of these callbacks.
CALLBACKS.register(
    "default",
    ("progress", "train_log", "metrics", "memory", "forecast", "visual_dl", "profiler", "predictions"),
)

_LOGGERS = "ppfleetx.core.loggers"
LOGGERS.register(
    "jsonl", f"{_CALLBACKS}.metrics:MetricsFile.of", traits=LoggerTraits(options=(), callback="metrics")
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
    f"{_MODULES}.classification:GPTFinetuneModule",
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
OPTIMIZERS.register(
    "Muon",
    "ppfleetx.optims.muon:muon",
    traits=OptimizerTraits(states=2, matrix_states=1, needs_whole_matrices=True),
)
OPTIMIZERS.register("SGD", "ppfleetx.optims.rule:SGD", traits=OptimizerTraits(states=0, reads=()))

_SCHEDULES = "ppfleetx.optims.schedules"
SCHEDULES.register("cosine", f"{_SCHEDULES}:cosine")
SCHEDULES.register("linear", f"{_SCHEDULES}:linear")
SCHEDULES.register("constant", f"{_SCHEDULES}:constant", traits=ScheduleTraits(decays=False))
SCHEDULES.register("inverse_square_root", f"{_SCHEDULES}:inverse_square_root")
SCHEDULES.register("wsd", f"{_SCHEDULES}:wsd")

_FINETUNING = "ppfleetx.data.tasks.finetuning"
DATASETS.register("GPTDataset", "ppfleetx.data.build:gpt_dataset", traits=DatasetTraits("corpus"))
DATASETS.register(
    "PromptResponseDataset", f"{_FINETUNING}:PromptResponseDataset.of", traits=DatasetTraits("texts")
)
DATASETS.register(
    "ChatDataset",
    f"{_FINETUNING}:ChatDataset.of",
    traits=DatasetTraits("texts", options=("chat_template",)),
)
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
    DATASETS.register(
        _task, f"{_FINETUNING}:GlueDataset.of", traits=DatasetTraits("texts", num_outputs=_outputs)
    )

TOKENIZERS.register("BPE", "ppfleetx.data.tokenizer.tokenizer:from_section")


def modules_that(trait: str) -> str:
    """Return the names of all tasks that have a trait, as one string such as ``GPTModule,
    GPTGenerationModule``. ``trait`` is a field of :class:`ModuleTraits`, such as ``classifies``."""
    return ", ".join(name for name in MODULES.names() if getattr(MODULES.traits(name), trait))


def unknown_options(name: str, options: Mapping[str, Any], takes: tuple[str, ...]) -> Iterator[RuleError]:
    """Yield an error for each key of ``options`` that is not in ``takes``, the options of the registered part
    ``name``."""
    for option in options:
        if option not in takes:
            listed = f"it takes {', '.join(takes)}" if takes else "it takes none"
            yield RuleError(("options", "name"), f"{name} has no option {option}; {listed}")
