"""Check of ``ppfleetx doctor`` that Paddle's registry contains the kernels that ppfleetx needs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from ppfleetx.distributed.device import backends, is_built_for_gpus, is_card, kind_of
from ppfleetx.doctor.results import Row, Target, fail, ok, warn
from ppfleetx.utils.device_support import HALF_TYPES
from ppfleetx.utils.gpu_operators import (
    GPU_BACKENDS,
    Kernel,
    registered_types,
    used_kernels,
    used_on_plugins,
)

_CPU_BACKENDS = ("CPU", "ONEDNN")
_FLOATS = (*HALF_TYPES, "float32", "float64")
# Kernels that are used only on GPUs.
_GPU_ONLY = ("flash", "c_softmax_with_cross_entropy_grad")
# Optional fused kernels: without them, ppfleetx/nn/fused_ops.py uses plain operators.
_REPLACED = ("fused_", "rms_norm", "swiglu", "flash_attn_qkvpacked")
_SHOWN = 8


def registered(target: Target) -> Iterator[Row]:
    """Check that Paddle has the kernels that ppfleetx needs (:mod:`ppfleetx.utils.gpu_operators`). CPU
    kernels are always checked. GPU kernels are checked if Paddle is built for GPUs. In other builds, the
    kernels of the run's card are checked, if it uses one."""
    from paddle.base import core

    registry = core._get_registered_phi_kernels("function")
    yield kernels_row("CPU", registry, used_on_cpu(used_kernels()), _CPU_BACKENDS)
    # The registry of a build for GPUs has the GPU kernels even on a machine without a GPU.
    if is_built_for_gpus():
        yield kernels_row("GPU", registry, used_by(target, used_kernels()), GPU_BACKENDS)
    elif is_card(target.device):
        yield card_row(target, registry)


def card_row(target: Target, registry: Mapping[str, Iterable[str]]) -> Row:
    """Return the report row about the kernels of a card that is not a GPU. Missing kernels are a failure. If
    the CPU has all of the missing kernels, they are only a warning, because the host then runs them."""
    kind, asked = kind_of(target.device), used_on_plugins(used_kernels())
    wanted = {
        name: [dtype for dtype in types if dtype in asked.get(name, ())]
        for name, types in used_by(target, used_kernels()).items()
    }
    absent = _absent(wanted, registry, backends(kind))
    lost = [
        pair for pair in absent if pair[1] not in registered_types(registry.get(pair[0], ()), _CPU_BACKENDS)
    ]
    if lost or not absent:
        there = {name: types for name, types in wanted.items() if types}
        return kernels_row(kind, registry, there, (*backends(kind), *_CPU_BACKENDS))
    return warn(
        f"kernels of the {kind}",
        f"{len(absent)} that ppfleetx may run are missing, and the host computes them, with copies: "
        f"{_shown([f'{name} ({dtype})' for name, dtype in absent])}",
        "a newer plugin may have them; docs/devices/ascend.md explains what each is for",
        absent=len(absent),
    )


def _absent(
    wanted: Mapping[str, Iterable[str]], registry: Mapping[str, Iterable[str]], backends: Collection[str]
) -> list[tuple[str, str]]:
    return [
        (name, dtype)
        for name, types in sorted(wanted.items())
        for dtype in types
        if dtype not in registered_types(registry.get(name, ()), backends)
    ]


def _shown(pairs: Sequence[str]) -> str:
    more = f" and {len(pairs) - _SHOWN} more" if len(pairs) > _SHOWN else ""
    return ", ".join(pairs[:_SHOWN]) + more


def used_by(target: Target, kernels: Mapping[str, Kernel]) -> dict[str, list[str]]:
    """Return the kernels that a run can use, each with the data types that the configuration allows. Optional
    fused kernels are left out."""
    wanted = target.float_types
    return {
        name: [dtype for dtype in kernel.used if dtype in wanted or dtype not in _FLOATS]
        for name, kernel in kernels.items()
        if not name.startswith(_REPLACED)
    }


def used_on_cpu(kernels: Mapping[str, Kernel]) -> dict[str, list[str]]:
    """Return the kernels that ppfleetx uses on a CPU, each with its data types except 16-bit floats. Optional
    fused kernels are left out."""
    return {
        name: [dtype for dtype in kernel.used if dtype not in HALF_TYPES]
        for name, kernel in kernels.items()
        if not name.startswith((*_GPU_ONLY, *_REPLACED))
    }


def kernels_row(
    place: str,
    registry: Mapping[str, Iterable[str]],
    wanted: Mapping[str, Iterable[str]],
    backends: Collection[str],
) -> Row:
    """Return the report row that says whether Paddle has all kernels in ``wanted``.

    Args:
        place: the kind of device, for the name of the row.
        registry: the kernels that Paddle has registered.
        wanted: the data types that each kernel must support.
        backends: the backends to search. A data type is supported if one of them has it.
    """
    absent = [f"{name} ({dtype})" for name, dtype in _absent(wanted, registry, backends)]
    pairs = sum(len(list(types)) for types in wanted.values())
    title = f"kernels of the {place}"
    if absent:
        return fail(
            title,
            f"{len(absent)} of {pairs} that ppfleetx runs are not in this build of Paddle: {_shown(absent)}",
            "install Paddle 3.3.x; with another version, try what you need before a long run",
            absent=len(absent),
        )
    return ok(title, f"all {pairs} that ppfleetx runs ({len(wanted)} kernels by type) exist", pairs=pairs)
