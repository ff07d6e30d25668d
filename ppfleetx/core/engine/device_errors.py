"""Explain device errors to the user. If memory ran out, the message suggests settings that need less
memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from ppfleetx.config.errors import DeviceError, OutOfMemoryError
from ppfleetx.config.message_text import bytes_text
from ppfleetx.config.sections.root import RunConfig
from ppfleetx.core.engine.callbacks.device_usage import device_name
from ppfleetx.distributed.context import ParallelContext
from ppfleetx.distributed.device import kind_of
from ppfleetx.planner.alternatives import memory_savings
from ppfleetx.planner.memory import CARD_PARTS
from ppfleetx.planner.prediction import run_prediction
from ppfleetx.resilience.hang_report import raised_at
from ppfleetx.resilience.progress import PROGRESS

_OF_PADDLE = (
    "ResourceExhaustedError",
    "Out of memory error on",
    "CUDA error(2)",
    "cudaErrorMemoryAllocation",
    "CUBLAS error(3)",  # a library has no memory for its workspace
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
# Paddle reports errors of plugin devices only as a number that can have several meanings. The call site shows
# whether the allocator raised the error.
_OF_PLUGIN, _ALLOCATOR = "CustomDevice error", re.compile(r"memory::allocation::\w+::AllocateImpl\(")
_SAID = re.compile(r"Cannot (?:malloc|allocate)[^\n]*|Fail to alloc[^\n]*|Unable to allocate[^\n]*")
_OF_DEVICE = re.compile(r"CustomDevice error, the error code is : \d+|(?:CUDA|XPU) error\(\d+\)[^\n(]*")
_BLOCKING = {"gpu": "CUDA_LAUNCH_BLOCKING=1", "npu": "FLAGS_npu_blocking_run=1"}
_MOST_SAVINGS = 3
_WORTH_SHOWING = 0.01


OF_EVALUATION = (
    "A smaller Global.micro_batch_size (Offline_Eval.batch_size for a text file), or tensor parallelism "
    "(Distributed.mp_degree: a checkpoint of any plan can be loaded) needs less memory."
)
OF_GENERATION = (
    "Fewer prompts at once, a smaller Generation.max_dec_len, num_return_sequences or num_beams, or tensor "
    "parallelism (Distributed.mp_degree: a checkpoint of any plan can be loaded) needs less memory."
)


@contextmanager
def explained_device_errors(
    cfg: RunConfig, ctx: ParallelContext, advice: str | None = None
) -> Iterator[None]:
    """Context manager that turns a device error into an OutOfMemoryError or a DeviceError with a clear
    message. If memory ran out, the message ends with ``advice`` or, if that is None, with settings that
    need less memory."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise OutOfMemoryError(message(error, cfg, ctx, advice)) from error
        said = _OF_DEVICE.search(str(error)) if isinstance(error, (OSError, SystemError)) else None
        if said is None:
            raise
        raise DeviceError(_device_message(said.group().strip(), error, ctx)) from error


def _device_message(said: str, error: BaseException, ctx: ParallelContext) -> str:
    blocking = _BLOCKING.get(kind_of(ctx.device))
    found = f" With {blocking} in the environment it is that operation." if blocking else ""
    return (
        f"{ctx.device} has failed ({_where(ctx)}): {said}\n"
        f"It was noticed at {raised_at(error)}; the operation that failed may be an earlier one.{found}\n"
        "Complete checkpoints are good: Engine.save_load.resume=auto continues from the last one. If it "
        "fails again at the same place, an operator is broken; else the card or its driver (ppfleetx doctor)."
    )


def _where(ctx: ParallelContext) -> str:
    rank = f"rank {ctx.rank}, " if ctx.world_size > 1 else ""
    step = "" if PROGRESS.step is None else f", step {PROGRESS.step}"
    return f"{rank}{PROGRESS.place}{step}"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error of Python, NumPy or Paddle means that host or device memory ran out."""
    if isinstance(error, MemoryError):
        return True
    if type(error) not in (RuntimeError, OSError, SystemError):
        return False
    text = str(error)
    of_allocator = _OF_PLUGIN in text and _ALLOCATOR.search(text) is not None
    return of_allocator or any(word in text for word in _OF_PADDLE)


def message(error: BaseException, cfg: RunConfig, ctx: ParallelContext, advice: str | None = None) -> str:
    """Return the message for an out-of-memory error: where memory ran out, what the memory is used for, and
    which settings need less. If ``advice`` is given, it is shown instead of the last two."""
    found = _SAID.search(str(error))
    said = found.group().strip() if found else (str(error).strip().splitlines() or ["no memory is left"])[-1]
    rest = _holders_and_savings(cfg, ctx) if advice is None else [advice]
    return "\n".join([f"out of memory ({_where(ctx)}): {said}", *rest])


def _holders_and_savings(cfg: RunConfig, ctx: ParallelContext) -> Iterator[str]:
    prediction = run_prediction(cfg, ctx.device, device_name=device_name(ctx.device))
    if prediction is None:
        yield (
            "A smaller Global.micro_batch_size, Model.use_recompute=True or more devices need less memory; "
            "what holds it is not known for this model."
        )
        return
    memory = prediction.memory[ctx.rank_on("pp")]
    parts = {part: getattr(memory, part) for part in CARD_PARTS}
    shown = [
        f"{part} {bytes_text(size)}"
        for part, size in sorted(parts.items(), key=lambda item: -item[1])
        if size > _WORTH_SHOWING * memory.total
    ]
    yield f"Predicted memory at the peak: {', '.join(shown)}; in total {bytes_text(memory.total)}."
    savings = memory_savings(prediction)[:_MOST_SAVINGS]
    if not savings:
        yield "No setting alone saves much: this run needs more devices (ppfleetx plan ranks what fits)."
        return
    yield "What needs less, the cheapest first:"
    for saving in savings:
        price = "in the same time" if saving.costs < 0.005 else f"a step takes {saving.costs:.0%} longer"
        yield f"  {saving.options}   saves {bytes_text(saving.saves)}, {price}"
