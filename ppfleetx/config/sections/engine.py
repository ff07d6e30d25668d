"""Configuration sections ``Global``, ``Engine`` and ``Profiler``: device, batch sizes, training loop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from ppfleetx.config.errors import RuleError
from ppfleetx.config.field_types import (
    Bool,
    CountInt,
    DeviceKind,
    Float,
    Int,
    IntervalOrZero,
    NonNegativeFloat,
    OptionalInterval,
    PathText,
    PositiveFloat,
    PositiveInt,
    Seed,
    Text,
)
from ppfleetx.config.message_text import counted
from ppfleetx.config.registries import CALLBACKS, LOGGERS, unknown_options
from ppfleetx.config.registry import Registered
from ppfleetx.config.section import Section


class GlobalConfig(Section):
    """Device, seed and batch sizes.

    global_batch_size = local_batch_size x dp_degree x sharding_degree, and
    accumulate_steps = local_batch_size / micro_batch_size.
    """

    device: DeviceKind = "auto"
    """The device: `cpu`, `gpu`, `xpu` (Kunlun), `npu` (Ascend), or the name of another device of a Paddle
    plugin; `auto` takes the cards that the installed Paddle supports, or else the CPU."""
    seed: Seed = 1024
    """Seed of initial weights, data order and dropout."""
    global_batch_size: PositiveInt | None = None
    """Sequences per optimizer step over the whole job; null: computed from the other batch sizes."""
    local_batch_size: PositiveInt | None = None
    """Sequences per optimizer step on one data-parallel replica; null: computed from the other batch
    sizes."""
    micro_batch_size: PositiveInt | None = None
    """Sequences per forward pass; null: `local_batch_size / Engine.accumulate_steps`."""
    rampup_batch_size: tuple[PositiveInt, PositiveInt, PositiveInt] | None = None
    """A growing batch, like Megatron-LM's `--rampup-batch-size`: [start, increment, samples]. It begins with
    `start` sequences per step and grows by `increment`, at equal intervals over `samples` sequences, to
    `global_batch_size`. Each size must be a multiple of `micro_batch_size` x data ranks."""
    rampup_seq_len: tuple[PositiveInt, PositiveInt, PositiveInt] | None = None
    """A growing sequence length: [start, increment, samples]. Training begins with the first `start` tokens
    of each sequence, and takes `increment` more at equal intervals over `samples` sequences, up to
    `Data.Train.dataset.max_seq_len`. The tokens left out are not trained on (DeepSpeed's sequence-length
    curriculum)."""
    allow_tf32: Bool = False
    """On NVIDIA GPUs of compute capability 8.0 and above, round the inputs of float32 matrix products to
    TF32: several times faster, with relative errors of about 1e-3 instead of 1e-7. 16-bit matrix products
    are not affected."""
    card: Text | None = None
    """The card for the run: a name that `ppfleetx plan` knows (`V100-32GB`, `A100-80GB`, ...) or a YAML file
    that describes a card. `--check` says whether the run fits into the card's memory. The run itself does not
    depend on this key."""
    peak_tflops: PositiveFloat | None = None
    """Peak TFLOP/s of one device for dense matrix products in the data type of the run; MFU is relative to
    this peak. null: the peak of `card`, or of the GPU in use, if `ppfleetx plan` knows it."""
    flags: dict[str, Bool | Int | Float | Text] = Field(default_factory=dict)
    """Paddle flags set before the first operation, e.g. `FLAGS_cudnn_deterministic: true`."""
    plugins: tuple[Text, ...] = ()
    """Modules that register parts named in this configuration, e.g. `[my_package.my_callbacks]`. A file alone
    must not make code run: the configuration is refused unless the command line (`--plugin`) or the variable
    `PPFLEETX_PLUGINS` names the same modules. Modules that only these two name are added to this list."""


class MixedPrecisionConfig(Section):
    """Mixed precision: which operations compute in 16 bits, and the loss scale."""

    enable: Literal["auto"] | Bool = False
    """Compute in `dtype` instead of float32; auto: do so if the device supports it, and log the choice."""
    dtype: Literal["float16", "bfloat16"] = "float16"
    """The 16-bit format. CPUs with AVX512-BF16 or AMX have bfloat16."""
    level: Literal["O1", "O2"] = "O2"
    """O1 casts the inputs of listed operations; O2 holds the weights in `dtype` with float32 master weights.
    On a CPU, both levels are the same: matrix products with weights and attention are computed in bfloat16,
    everything else in float32."""
    scale_loss: PositiveFloat = 32768.0
    """Loss scale at the start (float16)."""
    use_dynamic_loss_scaling: Bool = True
    """Halve the scale after overflows (see `hysteresis`), and double it after `incr_every_n_steps` steps
    without overflow; false: always `scale_loss`."""
    incr_every_n_steps: PositiveInt = 1000
    """Number of steps without overflow after which the scale doubles."""
    hysteresis: PositiveInt = 2
    """Number of overflows after which the scale halves. Every further overflow halves it again, until the
    scale has doubled once."""
    main_grad_fp32: Bool = True
    """Accumulate and reduce gradients in float32 (level O2)."""
    custom_black_list: tuple[Text, ...] = ()
    """Operations kept in float32, besides Paddle's own list."""
    custom_white_list: tuple[Text, ...] = ()
    """Operations computed in `dtype`, besides Paddle's own list."""

    @property
    def matmuls_in_float32(self) -> bool:
        """Whether ``custom_black_list`` keeps the matrix products of linears in float32."""
        return not {"matmul", "linear_v2"}.isdisjoint(self.custom_black_list)

    def violations(self) -> Iterator[RuleError]:
        both = sorted({*self.custom_black_list} & {*self.custom_white_list})
        if both:
            yield RuleError(
                ("custom_black_list", "custom_white_list"),
                f"an operation is in one of the lists, not in both: {', '.join(both)}",
            )


class SaveLoadConfig(Section):
    """Checkpoints: when to write them, and which one to start from."""

    save_steps: OptionalInterval = 1000
    """Optimizer steps between checkpoints; null: save only at the end. In run mode `epoch` it applies when
    `save_epoch` is null."""
    save_epoch: OptionalInterval = 1
    """Epochs between checkpoints in run mode `epoch`; null: save every `save_steps` steps."""
    output_dir: PathText = "./output"
    """Directory of one run, with its checkpoints, metrics.jsonl and the resolved config.yaml. If the
    directory already holds another run, a new run is refused unless it resumes or overwrites that run (see
    `resume` and `overwrite`)."""
    overwrite: Bool = False
    """Start over in the directory of another run. The other run's checkpoints, metrics and configuration are
    deleted once this run is ready to train. Other files are kept, and so is the checkpoint that this run
    starts from."""
    async_save: Bool = False
    """Write checkpoints in the background. Training waits at most until the state is copied to host memory.
    Each rank holds one more copy of its part of the checkpoint. One save runs at a time; the next save waits
    for it."""
    on_save_error: Literal["stop", "continue"] = "stop"
    """What to do if a checkpoint cannot be written (disk full, no permission): `stop` with an error, or
    report it and `continue` training. Earlier checkpoints are kept. A failure of the last save is always an
    error."""
    ckpt_dir: PathText | None = None
    """Checkpoint to resume or evaluate: its step directory, an output directory or a rank directory."""
    init_from: PathText | None = None
    """Checkpoint with the initial weights of a new run (step 0, new optimizer, new data order)."""
    resume: Literal["auto"] | Bool = False
    """`auto`: continue from the newest good checkpoint of `output_dir` if there is one, so that the same
    command continues after every interruption. true: the same, but a missing or damaged checkpoint is an
    error. false: ignore checkpoints there. If no run is continued, the run starts from `ckpt_dir` or
    `init_from` if one is set, and is new otherwise."""
    keep_max: PositiveInt | None = None
    """Keep only this many of the newest checkpoints of this run (and the best, see `keep_best`); null: all.
    Checkpoints of other runs, and the checkpoint that this run started from, are never deleted."""
    keep_best: Literal["metric", "loss"] | None = None
    """Save a checkpoint after each evaluation with the best result so far, by the GLUE task's `metric` or by
    `loss` (with several evaluation sets, the loss of the first). The file `best` in `output_dir` names this
    checkpoint, and `keep_max` does not delete it. `ckpt_dir` may be this file."""
    allow_missing: Bool = False
    """Keep the initial value of a parameter that the checkpoint lacks; false: this is an error."""
    allow_extra: Bool = False
    """Ignore a parameter of the checkpoint that the model lacks; false: this is an error."""
    allow_other_shapes: Bool = False
    """Keep the initial value of a parameter whose shape or vocabulary differs in the checkpoint; false: this
    is an error."""
    load_optim: Bool = True
    """Restore the optimizer's state on resume. If false, a run that `resume` continues starts with a fresh
    optimizer the first time. Later restarts by the same command restore that optimizer's state."""
    load_rng: Bool = True
    """Restore the random number generators on resume."""
    reset_data: Bool = False
    """Start the data from the beginning on resume (for another corpus). Steps, schedules and the ramps of
    batch size and sequence length continue. If `resume` continues a run, its data start over only the first
    time. Later restarts by the same command continue in the data."""
    lr_schedule: Literal["strict", "checkpoint", "config"] = "strict"
    """The learning-rate schedule on resume. `checkpoint`: that of the checkpoint. `config`: that of this
    configuration. `strict`: an error if the two differ."""
    verify: Bool = True
    """Compare every file's checksum with the manifest when loading."""

    def violations(self) -> Iterator[RuleError]:
        if self.resume and self.overwrite:
            yield RuleError(
                ("overwrite", "resume"), "a run resumes the one in output_dir or overwrites it, not both"
            )


class SpikeConfig(Section):
    """Detection of spikes: steps whose loss or gradient norm is far above the values of recent steps."""

    action: Literal["off", "skip", "rewind", "stop"] = "off"
    """Reaction to a spike, before the step changes any weight. `skip`: drop the step and its samples.
    `rewind`: go back to the last checkpoint and continue with the samples after the spike; without a
    checkpoint, skip. `stop`: end the run with exit code 2. All ranks do the same."""
    window: PositiveInt = 128
    """Number of recent steps whose median a new value is compared with."""
    min_steps: PositiveInt = 32
    """Steps before the first one that can count as a spike."""
    loss_deviations: NonNegativeFloat = 10.0
    """A loss is a spike if it is this many deviations above the median; 0: ignore the loss. A deviation is
    1.4826 times the median absolute deviation, but at least 1% of the median."""
    grad_norm_deviations: NonNegativeFloat = 20.0
    """The same for the gradient norm before clipping."""
    replay: Bool = True
    """Repeat a step that has a spike, with the same weights and samples. If the repetition gives the same
    numbers, data or model are the cause; if it gives other numbers, the machine is. If the new numbers are
    not a spike, training uses them."""
    max_in_a_row: PositiveInt = 5
    """End the run if more than this many steps in a row are spikes, or if it goes back to the same checkpoint
    more than this many times."""


class _NamedPart(Section):
    """Base class of sections with the name and the options of a registered part, such as a logger. In YAML,
    the name alone can replace the section."""

    SAYS: ClassVar[str] = "a name, or a mapping with name and options"

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value


class CallbackConfig(_NamedPart):
    """One callback of the training loop."""

    name: Annotated[str, Registered(CALLBACKS)]
    """A built-in name, or one that a plugin has registered."""

    options: dict[str, Bool | Int | Float | Text] = Field(default_factory=dict)
    """Arguments of the callback."""


class LoggerConfig(_NamedPart):
    """One destination for the metrics of a run."""

    name: Annotated[str, Registered(LOGGERS)]
    """A built-in name, or one that a plugin has registered."""

    options: dict[str, Bool | Int | Float | Text] = Field(default_factory=dict)
    """Arguments of the writer (docs/logging.md)."""

    def violations(self) -> Iterator[RuleError]:
        takes = LOGGERS.traits(self.name).options
        if takes is None:
            return
        yield from unknown_options(self.name, self.options, takes)
        for option in takes:
            if not isinstance(self.options.get(option, ""), str):
                yield RuleError((f"options.{option}",), "must be text; put numbers in quotes")


class EngineConfig(Section):
    """The training loop: its length, logging, evaluation, checkpoints and checks."""

    max_steps: PositiveInt = 500000
    """Optimizer steps of the run, which ends with a checkpoint. In run mode `epoch`, this is only an upper
    limit."""
    num_train_epochs: PositiveInt = 1
    """Passes over the data in run mode `epoch`."""
    run_mode: Literal["step", "epoch"] = "step"
    """Unit of the run's length and of the intervals between evaluations and between checkpoints: optimizer
    steps or epochs."""
    accumulate_steps: PositiveInt | None = None
    """Micro batches per optimizer step; null: `local_batch_size / micro_batch_size`. A value in a file that
    contradicts these sizes is replaced, with a warning; on the command line, it is an error."""
    logging_freq: PositiveInt = 1
    """Optimizer steps between log lines."""
    log_source_loss: Bool = False
    """Log the loss of each corpus of a blend separately. Training does not change."""
    eval_freq: IntervalOrZero = 500
    """Optimizer steps (epochs in run mode `epoch`) between evaluations; 0: none."""
    eval_iters: PositiveInt = 10
    """Batches of one evaluation."""
    test_iters: PositiveInt | None = None
    """Batches of the test set; null: `10 * eval_iters`."""
    mix_precision: MixedPrecisionConfig = MixedPrecisionConfig()
    save_load: SaveLoadConfig = SaveLoadConfig()
    checks: Literal["off", "cheap", "full"] = "cheap"
    """Look for silent errors: `cheap` checks loss, gradient norm, configurations, batches and copies of
    weights, for less than 1% of the time; `full` checks every tensor, sample and copy after every step.
    docs/parallelism.md describes both."""
    hang_timeout: NonNegativeFloat = 600.0
    """Seconds that training, evaluation or generation may go without progress; 0: do not watch. After that,
    every rank writes to `output_dir/hang` what it is waiting for, a message says which rank is missing and
    where, and `on_hang` decides what happens. Each finished micro batch counts as progress. A rank that is
    still computing or writing on the CPU counts as slow, not as hung."""
    hang_start_timeout: NonNegativeFloat = 300.0
    """The same limit until the first step is done or the checkpoint is loaded; 0: watch only after that."""
    on_hang: Literal["stop", "wait"] = "stop"
    """`stop`: all ranks end with exit code 4, so that `ppfleetx supervise` can start them again; `wait`:
    report and keep waiting."""
    straggler_freq: IntervalOrZero = 100
    """Optimizer steps between checks of the working time of each rank; 0: never. Ranks that cost the job more
    than 5% of its time are named in the log and in metrics.jsonl. On GPUs only the times of data loading
    differ."""
    spike: SpikeConfig = SpikeConfig()
    progress_bar: Literal["auto"] | Bool = "auto"
    """A progress bar instead of a stream of lines; `auto`: on a terminal."""
    loggers: tuple[LoggerConfig, ...] = ()
    """Further destinations for the records of metrics.jsonl; each item is a name or
    `{name: ..., options: {...}}`: tensorboard, wandb (offline by default), visualdl, csv, mlflow, or one of
    your own (docs/logging.md). `jsonl` is metrics.jsonl itself, which is always written."""
    callbacks: tuple[CallbackConfig, ...] = (CallbackConfig(name="default"),)
    """Callbacks, called in this order; each item is a name or `{name: ..., options: {...}}`. The list
    replaces the default one. `default` stands for progress, train_log, metrics, memory, forecast, visual_dl,
    profiler and predictions, so `[default, {name: my_csv, options: {file: loss.csv}}]` adds one to them.
    docs/extending.md shows how to write one."""

    def violations(self) -> Iterator[RuleError]:
        names = [item.name for item in self.loggers]
        if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
            yield RuleError(("loggers",), f"{twice[0]} is named {counted(names.count(twice[0]), 'time')}")


class ProfilerSummaryConfig(Section):
    """Which tables are printed at the end of a profile."""

    overview: Bool = True
    """Time by kind of event."""
    model: Bool = True
    """Time of forward, backward and optimizer."""
    kernel: Bool = True
    """Time by kernel (GPU)."""
    op: Bool = True
    """Time by operator."""
    device: Bool = False
    """Device utilization."""
    dist: Bool = False
    """Communication and its overlap."""
    mem: Bool = False
    """Memory by operator."""
    memcpy: Bool = False
    """Memory copies."""


class ProfilerConfig(Section):
    """Profile some steps with paddle.profiler."""

    enable: Bool = False
    """Profile the steps of `scheduler`."""
    scheduler: tuple[CountInt, CountInt] = (1, 5)
    """First step to profile, counted from 0, and the step before which profiling ends."""
    profiler_log: PathText = "profiler_log"
    """Directory of the chrome trace, within `Engine.save_load.output_dir`."""
    detailed: Bool = False
    """Add per-thread and per-shape detail to the summary."""
    record_shapes: Bool = True
    """Record input shapes of operators."""
    profile_memory: Bool = True
    """Record memory use."""
    summary: ProfilerSummaryConfig = ProfilerSummaryConfig()

    def violations(self) -> Iterator[RuleError]:
        if self.scheduler[0] >= self.scheduler[1]:
            yield RuleError(("scheduler",), "the first step must be smaller than the end step")
