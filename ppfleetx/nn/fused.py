"""Fused operators: one Paddle kernel in place of several. This is the only table of them, and the only
place that chooses.

What an operator computes is defined by its composite, plain operators that run everywhere. A fused operator
is taken where this build of Paddle, or the device's plugin, has it for the place and the element type, and
where a trial on small tensors gives what the composite gives, forward and backward. So an operator that is
missing, refuses to run or is wrong on some card costs speed and nothing else, and the log says why.

Programs that are exported have composites only.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import paddle

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.sections.model import FusedName
from ppfleetx.distributed.device import is_card, kernel_types, on_card, plugin_operator
from ppfleetx.distributed.init import flags_of_run
from ppfleetx.distributed.together import gather
from ppfleetx.nn.trials_apart import Pairs, difference, tried_apart
from ppfleetx.utils.log import get_logger

if TYPE_CHECKING:
    from ppfleetx.distributed.context import ParallelContext

_FLOATS = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class FusedOperator:
    """One row of the table.

    Attributes:
        does: what is fused, in words.
        kernels: Paddle's names of its kernels, backward ones too, which must exist for the element type.
        trial: ``module:function`` that runs it beside its composite on small tensors of an element type.
        types: element types it is used with.
        of_plugin: operator of a device's plugin that does the same; there it takes the kernels' place.
        exact_on_cpu: its CPU kernel gives the composite's bits, no slower: ``auto`` takes it there, where
            results are not to change.
    """

    does: str
    kernels: tuple[str, ...]
    trial: str
    types: tuple[str, ...] = _FLOATS
    of_plugin: str = ""
    exact_on_cpu: bool = False


_LAYER_TRIALS = "ppfleetx.nn.fused_trials"
_OPTIMIZER_TRIALS = "ppfleetx.optims.fused_trials"

TABLE: Mapping[FusedName, FusedOperator] = {
    "adamw": FusedOperator(
        "AdamW of all float32 parameters in few kernels, not one a parameter",
        ("fused_adam",),
        f"{_OPTIMIZER_TRIALS}:adamw",
        types=("float32",),
        exact_on_cpu=True,
    ),
    "grad_norm": FusedOperator(
        "squared norm of all small gradients as that of one tensor",
        ("squared_l2_norm", "concat"),
        f"{_OPTIMIZER_TRIALS}:grad_norm",
        types=("float32",),
    ),
    "grad_scale": FusedOperator(
        "all gradients clipped, or freed of the loss scale, in one kernel",
        ("check_finite_and_unscale",),
        f"{_OPTIMIZER_TRIALS}:grad_scale",
        types=("float32",),
    ),
    "rms_norm": FusedOperator(
        "RMSNorm: mean square, root and gain",
        ("rms_norm", "rms_norm_grad"),
        f"{_LAYER_TRIALS}:rms_norm",
        of_plugin="rms_norm_npu",
    ),
    "rope": FusedOperator(
        "the rotation of queries and keys by their positions",
        ("fused_rotary_position_embedding", "fused_rotary_position_embedding_grad"),
        f"{_LAYER_TRIALS}:rope",
        of_plugin="fused_rope",
    ),
    "swiglu": FusedOperator(
        "SiLU of the gate times the rest", ("swiglu", "swiglu_grad"), f"{_LAYER_TRIALS}:swiglu"
    ),
    "causal_softmax": FusedOperator(
        "causal mask and softmax of attention scores, where flash attention does not run",
        ("fused_softmax_mask_upper_triangle", "fused_softmax_mask_upper_triangle_grad"),
        f"{_LAYER_TRIALS}:causal_softmax",
    ),
    "packed_attention": FusedOperator(
        "flash attention that takes queries, keys and values as one tensor",
        ("flash_attn_qkvpacked", "flash_attn_qkvpacked_grad"),
        f"{_LAYER_TRIALS}:packed_attention",
        types=("float16", "bfloat16"),
    ),
    "plugin_attention": FusedOperator(
        "flash attention of a device's plugin; on GPUs Model.attention_kernel alone decides",
        (),
        f"{_LAYER_TRIALS}:plugin_attention",
        types=("float16", "bfloat16"),
        of_plugin="flash_attention_npu",
    ),
    "linear_grad_add": FusedOperator(
        "gradient of a 16-bit weight, its conversion to float32 and its addition to the step's sum",
        ("fused_linear_param_grad_add",),
        f"{_LAYER_TRIALS}:linear_grad_add",
        types=("float16", "bfloat16"),
    ),
    "weight_cast": FusedOperator(
        "weights converted to 16 bits once a step at O1, not in every product",
        ("cast",),
        f"{_LAYER_TRIALS}:weight_cast",
        types=("float16", "bfloat16"),
    ),
}


class FusedOps:
    """Which fused operators are taken, with which element types.

    Args:
        taken: by name.
        refused: the others, and why.
    """

    def __init__(
        self,
        taken: Mapping[str, Sequence[str]] | None = None,
        refused: Mapping[str, str] | None = None,
    ) -> None:
        self.taken, self.refused = dict(taken or {}), dict(refused or {})
        self._types = {name: {getattr(paddle, t) for t in types} for name, types in self.taken.items()}

    def takes(self, name: FusedName, *tensors: paddle.Tensor) -> bool:
        """Whether the fused operator ``name`` is used for such tensors. Never inside a program that is
        being exported."""
        types = self._types.get(name)
        if types is None or not paddle.in_dynamic_mode():
            return False
        return all(tensor.dtype in types for tensor in tensors)

    def __str__(self) -> str:
        taken = [f"{name} ({', '.join(types)})" for name, types in self.taken.items()]
        return ", ".join(taken) or "none"


NO_FUSED_OPS = FusedOps()
"""Composites everywhere."""


def choose(
    setting: Literal["auto", "none"] | Sequence[FusedName],
    types: Sequence[str],
    ctx: ParallelContext,
    unused: Mapping[FusedName, str] | None = None,
) -> FusedOps:
    """Resolve ``Model.fused_ops`` for this device, identically on all ranks.

    Args:
        setting: its value.
        types: element types that the run computes in, the first being that of its parameters at O1 and in
            float32; names as in :attr:`FusedOperator.types`.
        ctx: this process's place.
        unused: operators that the run has no place for, and why.

    Raises:
        ConfigError: a listed operator cannot run here in any of the types.
    """
    if setting == "none":
        return FusedOps(refused=dict.fromkeys(TABLE, "Model.fused_ops is none"))
    taken: dict[str, Sequence[str]] = {}
    refused: dict[str, str] = {}
    idle = {name: dict.fromkeys(types, why) for name, why in (unused or {}).items()}
    names = list(TABLE if setting == "auto" else setting)
    tried = obstacles([name for name in names if name not in idle], types, by_itself=setting == "auto")
    for name in names:
        found = idle.get(name) or tried[name]
        taken[name] = [dtype for dtype, why in found.items() if why is None]
        refused[name] = "; ".join(dict.fromkeys(why for why in found.values() if why))
    if ctx.world_size > 1 and on_card():
        _agree(taken, refused, gather(ctx, {name: list(kinds) for name, kinds in taken.items()}))
    missing = [name for name, kinds in taken.items() if not kinds]
    if missing and setting != "auto":
        raise ConfigError(
            f"{missing[0]} cannot run here: {refused[missing[0]]}; leave it out of the list",
            key="Model.fused_ops",
            value=missing[0],
        )
    left_out = {name: "it is not in Model.fused_ops" for name in TABLE if name not in taken}
    return FusedOps(
        {name: kinds for name, kinds in taken.items() if kinds},
        {**{name: refused[name] for name in missing}, **left_out},
    )


def say(ops: FusedOps) -> None:
    """Log the operators that are used; on a GPU, warn about those that are missing."""
    get_logger().info(f"fused operators: {ops}; all else by plain ones (Model.fused_ops)")
    if ops.refused and on_card():
        reasons = "; ".join(f"{name}: {why}" for name, why in ops.refused.items())
        get_logger().info(f"operators that are not fused: {reasons}")


def obstacles(
    names: Sequence[FusedName], types: Sequence[str], *, by_itself: bool = False
) -> dict[FusedName, dict[str, str | None]]:
    """For each operator and element type, the reason it cannot be used on the current device; None if it
    can.

    Args:
        by_itself: the user has not asked for the operators; on a CPU only those that change no bit are used.
    """
    device = paddle.get_device()
    found = {name: {dtype: _unfit(name, dtype, by_itself, device) for dtype in types} for name in names}
    fit = [(name, dtype) for name, of_types in found.items() for dtype, why in of_types.items() if not why]
    for (name, dtype), wrong in zip(fit, _tried(fit, device), strict=True):
        found[name][dtype] = wrong
    return found


def _unfit(name: FusedName, dtype: str, by_itself: bool, device: str) -> str | None:
    """The reason an operator cannot be used that is known without running it."""
    row, on_cpu = TABLE[name], not is_card(device)
    if dtype not in row.types:
        return f"it is not used with {dtype}"
    if by_itself and on_cpu and not row.exact_on_cpu:
        return "on a CPU it is slower, or changes last digits"
    if row.of_plugin and plugin_operator(row.of_plugin) is not None:
        return None
    if not row.kernels:
        return f"the device has no plugin with {row.of_plugin}"
    for kernel in row.kernels:
        if dtype not in kernel_types(kernel, device):
            return f"this build of Paddle has no {dtype} kernel {kernel} for the device"
    return None


_results: dict[tuple[str, str, str], str | None] = {}
"""Of the trials made so far: name, element type and device, and what was wrong."""


def _tried(pairs: Sequence[tuple[FusedName, str]], device: str) -> list[str | None]:
    """Run the trials of the operators; on a card, in another process, because a fault would poison this
    one."""
    new = [pair for pair in pairs if (*pair, device) not in _results]
    trials = [(TABLE[name].trial, dtype) for name, dtype in new]
    if not is_card(device):
        results = [difference(_function(place), dtype) for place, dtype in trials]
    else:
        results = tried_apart(trials, device, flags_of_run())
    _results.update({(*pair, device): wrong for pair, wrong in zip(new, results, strict=True)})
    return [_results[*pair, device] for pair in pairs]


def _function(place: str) -> Callable[[str], Pairs]:
    module, _, function = place.partition(":")
    return getattr(importlib.import_module(module), function)


def forget_trials() -> None:
    """Clear the results of trials, so that they run again."""
    _results.clear()
    kernel_types.cache_clear()


def _agree(
    taken: dict[str, Sequence[str]],
    refused: dict[str, str],
    everywhere: Sequence[Mapping[str, Sequence[str]]],
) -> None:
    """Keep the operators that every rank can use: copies of a parameter must stay equal to the last bit."""
    for name, kinds in taken.items():
        shared = [kind for kind in kinds if all(kind in other[name] for other in everywhere)]
        if len(shared) < len(kinds) and not shared:
            refused[name] = "another rank cannot run it"
        taken[name] = shared
