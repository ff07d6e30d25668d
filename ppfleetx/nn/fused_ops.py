"""The table of fused operators (one kernel in place of several), and the choice of operators for a run.

A fused operator is used only if it exists for the device and element type, and if its results in a small
trial match its composite: the plain operators that it replaces. Exported programs contain only composites.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import paddle

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.registry import load_target
from ppfleetx.config.sections.model import FusedName
from ppfleetx.distributed.coordination import gather
from ppfleetx.distributed.device import is_card, kernel_types, on_card, plugin_operator
from ppfleetx.distributed.init import flags_of_run
from ppfleetx.nn.fused_trial_process import difference, tried_in_child
from ppfleetx.utils.device_support import HALF_TYPES
from ppfleetx.utils.log import get_logger

if TYPE_CHECKING:
    from ppfleetx.distributed.context import ParallelContext


@dataclass(frozen=True)
class FusedOperator:
    """One row of the table of fused operators.

    Attributes:
        kernels: names of Paddle's kernels, forward and backward, that must exist for the element type.
        types: element types with which the operator is used.
        of_plugin: name of the equivalent operator of a device plugin, used instead on the plugin's device.
        trials: module with the operator's trial. The trial is a function with the operator's name. It runs
            the operator and its composite on small tensors.
        exact_on_cpu: whether the operator's CPU kernel gives bitwise the same results as its composite, and
            is not slower. On a CPU, the setting ``auto`` uses only such operators.
    """

    kernels: tuple[str, ...]
    types: tuple[str, ...] = ("float32", *HALF_TYPES)
    of_plugin: str = ""
    trials: str = "ppfleetx.nn.fused_trials"
    exact_on_cpu: bool = False


_OPTIMIZER_TRIALS = "ppfleetx.optims.fused_trials"

TABLE: Mapping[FusedName, FusedOperator] = {
    "adamw": FusedOperator(("fused_adam",), types=("float32",), trials=_OPTIMIZER_TRIALS, exact_on_cpu=True),
    "grad_norm": FusedOperator(("squared_l2_norm", "concat"), types=("float32",), trials=_OPTIMIZER_TRIALS),
    "grad_scale": FusedOperator(("check_finite_and_unscale",), types=("float32",), trials=_OPTIMIZER_TRIALS),
    "rms_norm": FusedOperator(("rms_norm", "rms_norm_grad"), of_plugin="rms_norm_npu"),
    "rope": FusedOperator(
        ("fused_rotary_position_embedding", "fused_rotary_position_embedding_grad"), of_plugin="fused_rope"
    ),
    "swiglu": FusedOperator(("swiglu", "swiglu_grad")),
    "causal_softmax": FusedOperator(
        ("fused_softmax_mask_upper_triangle", "fused_softmax_mask_upper_triangle_grad")
    ),
    "packed_attention": FusedOperator(
        ("flash_attn_qkvpacked", "flash_attn_qkvpacked_grad"), types=HALF_TYPES
    ),
    "plugin_attention": FusedOperator((), types=HALF_TYPES, of_plugin="flash_attention_npu"),
    "linear_grad_add": FusedOperator(("fused_linear_param_grad_add",), types=HALF_TYPES),
    "weight_cast": FusedOperator(("cast",), types=HALF_TYPES),
}
"""The fused operators by name. docs/numerics.md lists the plain operators that each one replaces."""


class FusedOps:
    """The fused operators in use, each with its element types (``taken``), and the reasons why other
    operators are not used (``refused``)."""

    def __init__(
        self,
        taken: Mapping[str, Sequence[str]] | None = None,
        refused: Mapping[str, str] | None = None,
    ) -> None:
        self.taken, self.refused = dict(taken or {}), dict(refused or {})
        self._types = {name: {getattr(paddle, t) for t in types} for name, types in self.taken.items()}

    def takes(self, name: FusedName, *tensors: paddle.Tensor) -> bool:
        """Return whether the fused operator ``name`` is in use for the types of ``tensors``; always False
        during an export."""
        types = self._types.get(name)
        if types is None or not paddle.in_dynamic_mode():
            return False
        return all(tensor.dtype in types for tensor in tensors)

    def __str__(self) -> str:
        taken = [f"{name} ({', '.join(types)})" for name, types in self.taken.items()]
        return ", ".join(taken) or "none"


NO_FUSED_OPS = FusedOps()
"""No fused operators: composites everywhere."""


def choose(
    setting: Literal["auto", "none"] | Sequence[FusedName],
    types: Sequence[str],
    ctx: ParallelContext,
    unused: Mapping[FusedName, str] | None = None,
) -> FusedOps:
    """Choose the fused operators to use on this device. All ranks choose the same operators.

    Args:
        setting: the value of ``Model.fused_ops``.
        types: element types in which the run computes.
        unused: operators that this run does not need, each with the reason.

    Raises:
        ConfigError: an operator listed in ``setting`` cannot run here in any of the types.
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
    """Log which fused operators are in use and, except on a CPU, why other operators are not used."""
    get_logger().info(f"fused operators: {ops}; plain operators for the rest (Model.fused_ops)")
    if ops.refused and on_card():
        reasons = "; ".join(f"{name}: {why}" for name, why in ops.refused.items())
        get_logger().info(f"fused operators not used: {reasons}")


def obstacles(
    names: Sequence[FusedName], types: Sequence[str], *, by_itself: bool = False
) -> dict[FusedName, dict[str, str | None]]:
    """Return why operators cannot be used on the current device: a reason for each operator and element type,
    or None if the operator can be used.

    Args:
        by_itself: whether the toolkit chooses the operators (``auto``).
    """
    device = paddle.get_device()
    found = {name: {dtype: _unfit(name, dtype, by_itself, device) for dtype in types} for name in names}
    fit = [(name, dtype) for name, of_types in found.items() for dtype, why in of_types.items() if not why]
    for (name, dtype), wrong in zip(fit, _tried(fit, device), strict=True):
        found[name][dtype] = wrong
    return found


def _unfit(name: FusedName, dtype: str, by_itself: bool, device: str) -> str | None:
    """Return the reason why an operator cannot be used with element type ``dtype`` on ``device``; None if
    only a trial can tell. No trial is run."""
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
"""Results of all trials so far, by (name, element type, device): the failure, or None."""


def _tried(pairs: Sequence[tuple[FusedName, str]], device: str) -> list[str | None]:
    """Return the result of the trial of each pair (operator, element type), in order. If a result is not
    cached, the trial is run: on a CPU in this process, otherwise in a child process."""
    new = [pair for pair in pairs if (*pair, device) not in _results]
    trials = [(f"{TABLE[name].trials}:{name}", dtype) for name, dtype in new]
    if not is_card(device):
        results = [difference(load_target(place), dtype) for place, dtype in trials]
    else:
        results = tried_in_child(trials, device, flags_of_run())
    _results.update({(*pair, device): wrong for pair, wrong in zip(new, results, strict=True)})
    return [_results[*pair, device] for pair in pairs]


def forget_trials() -> None:
    _results.clear()
    kernel_types.cache_clear()


def _agree(
    taken: dict[str, Sequence[str]],
    refused: dict[str, str],
    everywhere: Sequence[Mapping[str, Sequence[str]]],
) -> None:
    """Remove from ``taken`` every operator and type that any rank cannot use. Replicas of a parameter then
    stay bitwise equal. ``everywhere`` contains each rank's ``taken``."""
    for name, kinds in taken.items():
        shared = [kind for kind in kinds if all(kind in other[name] for other in everywhere)]
        if len(shared) < len(kinds) and not shared:
            refused[name] = "another rank cannot run it"
        taken[name] = shared
