"""Every operator that ppfleetx runs, and whether the installed Paddle has it: nothing is run for that."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from ppfleetx.doctor.case import Case
from ppfleetx.doctor.rows import Row, fail, ok
from ppfleetx.utils.gpu_operators import GPU_BACKENDS, Kernel, registered_types, used_kernels

_CPU_BACKENDS = ("CPU", "ONEDNN")
_FLOATS = ("float16", "bfloat16", "float32", "float64")
_HALF = ("float16", "bfloat16")
# Kernels that are reached on a GPU alone; a CPU takes another way there.
_GPU_ONLY = ("flash", "c_softmax_with_cross_entropy_grad")
# Fused ones: where one is missing, plain operators take its place (ppfleetx/nn/fused.py); that is no failure.
_REPLACED = ("fused_", "rms_norm", "swiglu", "flash_attn_qkvpacked")
_SHOWN = 8


def registered(case: Case) -> Iterator[Row]:
    """The kernels of the committed table against the registry of the installed build.

    For GPUs where the build is for GPUs, with a card or without one; for the CPU in the types in which it
    computes.
    """
    import paddle
    from paddle.base import core

    registry = core._get_registered_phi_kernels("function")
    yield kernels_row("CPU", registry, used_on_cpu(used_kernels()), _CPU_BACKENDS)
    if paddle.is_compiled_with_cuda():
        yield kernels_row("GPU", registry, used_by(case, used_kernels()), GPU_BACKENDS)


def used_by(case: Case, kernels: Mapping[str, Kernel]) -> dict[str, list[str]]:
    """Kernels and the element types a plan can use them with."""
    wanted = case.float_types
    return {
        name: [dtype for dtype in kernel.used if dtype in wanted or dtype not in _FLOATS]
        for name, kernel in kernels.items()
        if not name.startswith(_REPLACED)
    }


def used_on_cpu(kernels: Mapping[str, Kernel]) -> dict[str, list[str]]:
    """Kernels and the types of the CPU, which stores 16-bit numbers and does not compute in them."""
    return {
        name: [dtype for dtype in kernel.used if dtype not in _HALF]
        for name, kernel in kernels.items()
        if not name.startswith((*_GPU_ONLY, *_REPLACED))
    }


def kernels_row(
    place: str,
    registry: Mapping[str, Iterable[str]],
    wanted: Mapping[str, Iterable[str]],
    backends: Collection[str],
) -> Row:
    """Whether a registry has what is wanted.

    Args:
        place: CPU or GPU.
        registry: ``paddle.base.core._get_registered_phi_kernels("function")``.
        wanted: element types by kernel.
        backends: of the registry that count.
    """
    absent, pairs = [], 0
    for name, dtypes in sorted(wanted.items()):
        there = registered_types(registry.get(name, ()), backends)
        for dtype in dtypes:
            pairs += 1
            if dtype not in there:
                absent.append(f"{name} ({dtype})")
    title = f"kernels of the {place}"
    if absent:
        more = f" and {len(absent) - _SHOWN} more" if len(absent) > _SHOWN else ""
        return fail(
            title,
            f"{len(absent)} of {pairs} that ppfleetx runs are not in this build of Paddle: "
            f"{', '.join(absent[:_SHOWN])}{more}",
            "install Paddle 3.3.x; with another version, run what you need first and tell us what fails",
            absent=len(absent),
        )
    return ok(title, f"all {pairs} that ppfleetx runs ({len(wanted)} kernels by type) are there", pairs=pairs)
