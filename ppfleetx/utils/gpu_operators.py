"""Look up which of Paddle's kernels a run uses on a card, and with which element types. The table is
``gpu_operators.json``, which ``make operators`` records from test runs. Does not import Paddle."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from ppfleetx.config.sections.root import RunConfig
from ppfleetx.utils.device_support import HALF_TYPES, NPU

TABLE = Path(__file__).with_suffix(".json")
GPU_BACKENDS = ("GPU", "KPS", "GPUDNN")
"""Backends in Paddle's kernel registry that run on a GPU."""
PLUGIN_BACKENDS = ("CUSTOM",)
"""Backends of kernels that Paddle provides for the devices of all plugins."""

# Prefixes of kernels used only on GPUs. The process groups of plugins need no kernel for all_reduce.
_GPUS_ALONE = ("flash", "fused_", "linear_v2", "rms_norm", "all_reduce")
# (kernel, type): on the devices of plugins, ppfleetx calls the kernel with float32 instead of the type.
_IN_FLOAT32 = {
    *product(("dropout", "dropout_grad", "relu", "relu_grad"), HALF_TYPES),
    ("searchsorted", "int32"),  # for flashmask
}


@dataclass(frozen=True)
class Kernel:
    """One kernel of Paddle in the table ``gpu_operators.json``.

    Attributes:
        used: element types (in general, of the first operand) with which ppfleetx calls the kernel.
        gpu: types that Paddle registers for a GPU.
        npu: types that are available on Ascend cards.
    """

    used: tuple[str, ...]
    gpu: tuple[str, ...]
    npu: tuple[str, ...] = ()


def used_kernels() -> dict[str, Kernel]:
    content = json.loads(TABLE.read_text(encoding="utf-8"))
    return {
        name: Kernel(*(tuple(entry[column]) for column in ("used", "gpu", "npu")))
        for name, entry in content["kernels"].items()
    }


def used_on_plugins(kernels: Mapping[str, Kernel]) -> dict[str, tuple[str, ...]]:
    """Return the kernels that ppfleetx uses on a plugin's device, such as an Ascend card, each with its
    element types."""
    asked = {name: kernel.used for name, kernel in kernels.items() if not name.startswith(_GPUS_ALONE)}
    return {name: tuple(t for t in types if (name, t) not in _IN_FLOAT32) for name, types in asked.items()}


def registered_types(keys: Iterable[str], backends: Collection[str] = GPU_BACKENDS) -> set[str]:
    """Return the element types for which Paddle has a kernel on one of ``backends``. ``keys`` are the
    kernel's entries in ``paddle.base.core._get_registered_phi_kernels("function")``, such as ``(GPU,
    Undefined(AnyLayout), float32)``."""
    parts = (key.strip("() ").split(", ") for key in keys)
    return {part[-1] for part in parts if part[0] in backends}


def host_operator_notes(cfg: RunConfig, device: str) -> list[str]:
    """Return a sentence for each configuration key that makes a run on an Ascend card do some operations on
    the host. For other devices, the list is empty. ``docs/devices/ascend.md`` has the full list of these
    operations."""
    if device != NPU:
        return []
    reasons = [(key, what) for applies, key, what in _NPU_ON_HOST if applies(cfg)]
    return [
        f"{key}: Ascend's plugin (of October 2024) has no {what}; the host does it" for key, what in reasons
    ]


_NPU_ON_HOST: tuple[tuple[Callable[[RunConfig], bool], str, str], ...] = (
    (
        lambda cfg: cfg.Engine.mix_precision.dtype == "bfloat16" and _learns_bounds(cfg),
        "Compress.Quantization",
        "subtraction in bfloat16, which PACT needs",
    ),
    (
        lambda cfg: cfg.Model.module == "GPTEvalModule",
        "Model.module = GPTEvalModule",
        "scatter in float64, nor index_select in bfloat16",
    ),
    (
        lambda cfg: cfg.Model.module == "GPTGenerationModule",
        "Model.module = GPTGenerationModule",
        "put_along_axis, nor cumulative sums in float64, for choosing tokens",
    ),
)


def _learns_bounds(cfg: RunConfig) -> bool:
    quantization = cfg.Compress.quantization
    return quantization is not None and "PACT" in (
        quantization.weight_preprocess_type,
        quantization.activation_preprocess_type,
    )
