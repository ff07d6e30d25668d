"""Configuration section ``Optimizer``: update rule, schedules of learning rate and weight decay, clipping."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ppfleetx.config.batch_sizes import BatchPlan
from ppfleetx.config.errors import RuleError
from ppfleetx.config.field_types import (
    Bool,
    CountInt,
    Float,
    Fraction,
    Int,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Text,
    UnitFloat,
)
from ppfleetx.config.registries import OPTIMIZERS, SCHEDULES, unknown_options
from ppfleetx.config.registry import Registered
from ppfleetx.config.section import Section

_STYLE_OF_NAME = {"CosineAnnealingWithWarmupDecay": "cosine", "LinearDecayWithWarmup": "linear"}


class LRConfig(Section):
    """Learning rate as a function of the optimizer step n = 1, 2, ...

    If `unit` is `sample`, n is instead the number of training samples up to the end of the step. After a
    linear warm-up to `max_lr` (`max_lr * n / warmup`), the rate follows `decay_style` up to
    n = `decay_steps`, and is `min_lr` afterwards. `constant` stays at `max_lr`. `inverse_square_root` is
    `max_lr * sqrt(warmup / n)`, but at least `min_lr`.
    """

    name: Literal["CosineAnnealingWithWarmupDecay", "LinearDecayWithWarmup"] | None = None
    """FleetX's name of a schedule; determines `decay_style` if that is not given."""
    decay_style: Annotated[str, Registered(SCHEDULES)] = "cosine"
    """Shape of the curve after the warm-up. `wsd`: warm-up, stable, decay over the last
    `wsd_decay_steps`."""
    max_lr: PositiveFloat = 5e-5
    """Highest learning rate."""
    min_lr: NonNegativeFloat = 0.0
    """Lowest learning rate after the warm-up."""
    unit: Literal["step", "sample"] = "step"
    """The unit of `warmup_steps`, `decay_steps`, `wsd_decay_steps` and the curve of `weight_decay_schedule`:
    optimizer steps, or training samples as with Megatron-LM's `--train-samples`. The unit matters if the
    batch size grows (`Global.rampup_batch_size`). Steps without an update do not count."""
    decay_steps: PositiveInt | None = None
    """Optimizer step (or sample) after which the rate is `min_lr`; null: the end of the run."""
    warmup_steps: CountInt | None = None
    """Length of the warm-up in optimizer steps (or samples); not together with `warmup_rate`."""
    warmup_rate: Fraction | None = None
    """Length of the warm-up as a fraction of `decay_steps`; not together with `warmup_steps`."""
    wsd_decay_steps: PositiveInt | None = None
    """Length of the final decay of `wsd`; null: a tenth of `decay_steps`."""
    wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """Shape of the final decay of `wsd`."""

    def in_units(self, steps: int, batch: BatchPlan) -> int:
        """Convert the first ``steps`` optimizer steps of a run to the schedule's ``unit``. Returns ``steps``
        or the number of samples in these steps."""
        return batch.consumed_after(steps) if self.unit == "sample" else steps

    @property
    def warmup_length(self) -> float:
        """The length of the warm-up in the schedule's ``unit``: a number of steps or of samples. It can be a
        fraction if it is computed from ``warmup_rate``.

        Raises:
            RuleError: ``warmup_rate`` is given without ``decay_steps``.
        """
        if self.warmup_steps is not None:
            return self.warmup_steps
        if not self.warmup_rate:
            return 0
        if self.decay_steps is None:
            raise RuleError(("decay_steps", "warmup_rate"), "warmup_rate is a fraction of decay_steps")
        return self.warmup_rate * self.decay_steps

    @model_validator(mode="before")
    @classmethod
    def _style_from_name(cls, values: Any) -> Any:
        name = values.get("name") if isinstance(values, dict) else None
        if not isinstance(name, str) or name not in _STYLE_OF_NAME:
            return values
        style = _STYLE_OF_NAME[name]
        given = values.get("decay_style")
        if given is not None and given != style:
            raise RuleError(
                ("decay_style", "name"), f"contradicts the schedule's name, which means {style!r}"
            )
        return {**values, "decay_style": style}

    def violations(self) -> Iterator[RuleError]:
        if self.warmup_steps is not None and self.warmup_rate is not None:
            yield RuleError(
                ("warmup_rate", "warmup_steps"),
                "give the warm-up once: in steps or as a rate; set the other to null",
            )
        if self.min_lr > self.max_lr:
            yield RuleError(
                ("min_lr", "max_lr"), f"the lowest rate {self.min_lr} is above the highest {self.max_lr}"
            )
        if self.wsd_decay_steps is not None and self.decay_style != "wsd":
            yield RuleError(
                ("wsd_decay_steps", "decay_style"), f"has no meaning with decay_style {self.decay_style!r}"
            )


class GradClipConfig(Section):
    """Gradient clipping by the global norm."""

    name: Literal["ClipGradByGlobalNorm"] = "ClipGradByGlobalNorm"
    """Scale all gradients if their joint L2 norm exceeds `clip_norm`."""
    clip_norm: NonNegativeFloat = 1.0
    """Largest norm; 0 turns clipping off."""


class WeightDecayScheduleConfig(Section):
    """Weight decay that changes over the run, from `start` to `end`.

    Step n of N has the value at the fraction n / N of the curve from `start` to `end`. `Optimizer.lr.unit`
    says whether steps or samples count.
    """

    start: NonNegativeFloat
    """Weight decay at step 0, one step before the first step."""
    end: NonNegativeFloat
    """Weight decay at the last step."""
    style: Literal["constant", "linear", "cosine"] = "linear"
    """Shape of the curve from `start` to `end`."""

    def violations(self) -> Iterator[RuleError]:
        if self.style == "constant" and self.start != self.end:
            yield RuleError(("end", "start", "style"), "a constant weight decay starts and ends the same")


ParamKind = Literal[
    "matrix", "bias", "norm", "word_embedding", "position_embedding", "head", "router", "lora"
]
MuonScale = Literal["match_rms_adamw", "original", "spectral", "unit_rms_norm"]
Coefficients = Literal["simple", "quintic", "polar_express", "aol"]


class MuonConfig(Section):
    """The Muon optimizer (`Optimizer.name: Muon`).

    For a weight matrix with gradient g, the momentum is `m = momentum * m + (1 - momentum) * g`. The update
    is m, or its Nesterov form, after orthogonalization.
    """

    momentum: Fraction = 0.95
    """Decay of the momentum."""
    nesterov: Bool = True
    """Orthogonalize `(1 - momentum) * g + momentum * m`; False: orthogonalize `m`."""
    scale: MuonScale = "match_rms_adamw"
    """Factor of the update of a matrix [out, in]. `match_rms_adamw`: 0.2 sqrt(max(out, in)), so that learning
    rates for AdamW can be kept; `original`: sqrt(max(1, out / in)); `spectral`: sqrt(max(out, in));
    `unit_rms_norm`: sqrt(out / in)."""
    steps: PositiveInt = 5
    """Newton-Schulz iterations."""
    coefficients: Coefficients = "simple"
    """Table of the iterations' coefficients. `polar_express` needs 8 steps or more, `quintic` a multiple of 5
    steps, and `aol` a multiple of 4."""
    split: Literal["parts", "heads", "none"] = "parts"
    """Split of fused weights into matrices. `parts`: queries, keys, values, gate and up, each as a whole;
    `heads`: each head of queries, keys and values separately; `none`: no split."""
    epsilon: PositiveFloat = 1e-7
    """Smallest norm that a matrix is divided by."""
    newton_schulz_dtype: Literal["float32", "auto"] = "float32"
    """Data type in which the iterations multiply matrices. `auto`: bfloat16 (as in PyTorch's Muon) if the
    device supports it, else float32."""

    def violations(self) -> Iterator[RuleError]:
        rules = {"quintic": 5, "aol": 4}
        if self.steps % rules.get(self.coefficients, 1):
            unit = rules[self.coefficients]
            yield RuleError(
                ("steps", "coefficients"), f"{self.coefficients} needs a multiple of {unit} steps"
            )
        if self.coefficients == "polar_express" and self.steps < 8:
            yield RuleError(("steps", "coefficients"), "polar_express needs at least 8 steps")


class ParamGroupConfig(Section):
    """A group of parameters with its own training settings. A parameter belongs to the first group that
    matches."""

    parameters: Text | tuple[Text, ...] | None = None
    """Patterns for canonical names, with `*` and `?`, e.g. `decoder.layers.*.attention.*`; null: all
    names."""
    kinds: tuple[ParamKind, ...] | None = None
    """Kinds of parameters; if `parameters` is also given, both must match."""
    lr_factor: NonNegativeFloat = 1.0
    """Factor of the learning rate."""
    weight_decay: NonNegativeFloat | None = None
    """Weight decay of the group in all steps, also for biases and norms; null: as for other parameters."""
    optimizer: Annotated[str, Registered(OPTIMIZERS)] | None = None
    """Another optimizer; null: `Optimizer.name`."""
    beta1: Fraction | None = None
    """AdamW's beta1; null: `Optimizer.beta1`."""
    beta2: Fraction | None = None
    """AdamW's beta2; null: `Optimizer.beta2`."""

    def violations(self) -> Iterator[RuleError]:
        if not self.parameters and not self.kinds:
            yield RuleError(("parameters", "kinds"), "say which parameters: by name, by kind, or both")

    @property
    def patterns(self) -> tuple[str, ...]:
        """The name patterns in ``parameters`` as a tuple, empty if every name matches."""
        return (self.parameters,) if isinstance(self.parameters, str) else self.parameters or ()

    def takes(self, name: str, kind: ParamKind) -> bool:
        """Whether a parameter's name and kind (``bias``, ``norm``, ...) match this group.

        If several groups match, the parameter belongs to the first one.
        """
        if self.kinds and kind not in self.kinds:
            return False
        return not self.patterns or any(fnmatchcase(name, pattern) for pattern in self.patterns)


def is_block_matrix(name: str, kind: ParamKind) -> bool:
    """Whether Muon updates this parameter: a weight matrix in a block, but not of a router or an adapter."""
    return kind == "matrix" and name.startswith("decoder.layers.")


class OptimizerConfig(Section):
    """The optimizer and its settings."""

    name: Annotated[str, Registered(OPTIMIZERS)] = "AdamW"
    """AdamW with decoupled weight decay; Muon for the matrices of the blocks and AdamW for the rest; plain
    gradient descent (SGD); or one of your own (docs/extending.md)."""
    weight_decay: NonNegativeFloat = 0.01
    """Weight decay of matrices and embeddings; biases and norms have none."""
    beta1: Fraction = 0.9
    """AdamW: decay of the first moment."""
    beta2: Fraction = 0.999
    """AdamW: decay of the second moment."""
    epsilon: PositiveFloat = 1e-8
    """AdamW: added to the root of the second moment."""
    options: dict[str, Bool | Int | Float | Text] = Field(default_factory=dict)
    """For an optimizer of your own: the options it was registered with."""
    muon: MuonConfig = MuonConfig()
    groups: tuple[ParamGroupConfig, ...] = ()
    """Groups of parameters with their own rates, decays or optimizers."""
    layer_decay: UnitFloat = 1.0
    """Layer-wise decay of the learning rate, for finetuning. With L blocks, the rate is multiplied by
    layer_decay ** (L - i) in block i (from 0), by layer_decay ** (L + 1) in the embedding, and by 1 after the
    blocks."""
    lr: LRConfig = LRConfig()
    grad_clip: GradClipConfig | None = GradClipConfig()
    weight_decay_schedule: WeightDecayScheduleConfig | None = None

    @property
    def names(self) -> set[str]:
        """The names of the optimizers in use: the main one, and those of the parameter groups."""
        return {self.name, *(group.optimizer or self.name for group in self.groups)}

    @property
    def needs_whole_matrices(self) -> bool:
        return any(OPTIMIZERS.traits(name).needs_whole_matrices for name in self.names)

    def states_of(self, name: str, kind: ParamKind) -> int:
        """The number of float32 optimizer states that parameter ``name`` has.

        Each state has the same shape as the parameter.
        """
        own = next((group.optimizer for group in self.groups if group.takes(name, kind)), None)
        traits = OPTIMIZERS.traits(own or self.name)
        few = traits.matrix_states if is_block_matrix(name, kind) else None
        return traits.states if few is None else few

    def violations(self) -> Iterator[RuleError]:
        names = sorted(self.names)
        takes = tuple(option for name in names for option in OPTIMIZERS.traits(name).options)
        yield from unknown_options(" or ".join(names), self.options, takes)
        for number, group in enumerate(self.groups):
            name = group.optimizer or self.name
            for key in ("beta1", "beta2", "weight_decay"):
                if getattr(group, key) is not None and key not in OPTIMIZERS.traits(name).reads:
                    yield RuleError((f"groups.{number}.{key}",), f"is not read by {name}")
