"""16-bit training in the ranks of a pool, with the kernels that a CPU lacks emulated."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.parity.training import build, micro_batches, take_step

OPTIONS = "Engine.mix_precision"


def train(
    plan: dict[str, Any],
    world_size: int,
    micro_batch_size: int,
    mix_precision: Mapping[str, Any],
    steps: int = 5,
    model: str = "gpt",
    optimizer: str = "adamw",
    extra: dict[str, Any] | None = None,
    spoilt: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """A short run.

    Args:
        mix_precision: keys of ``Engine.mix_precision``.
        extra: more overrides; on another ``Global.device`` than the CPU the kernels are its own.
        spoilt: step (from 0, as a text) -> canonical name of a parameter whose gradient is made infinite
            in that step, on the last rank that holds it and on no other.

    Returns:
        Losses, gradient norms, loss scales, skipped steps, digests of all state after each step, and the
        error the run ended with.
    """
    import paddle

    from ppfleetx.distributed.consistency_checks import check_replicas
    from ppfleetx.parallel.step_runner import NonFiniteError
    from tests.helpers.low_precision import emulated

    is_cpu = (extra or {}).get("Global.device", "cpu") == "cpu"
    kernels = emulated() if is_cpu else contextlib.nullcontext()
    options = {f"{OPTIONS}.{key}": value for key, value in {"enable": True, **mix_precision}.items()}
    outputs, digests, error = [], [], ""
    with paddle.utils.unique_name.guard(), kernels:
        cfg, ctx, runner = build(plan, world_size, model, optimizer, micro_batch_size, {**options, **extra})
        digests.append(state_digest(runner))
        inexact = _inexact_masters(runner, cfg.Global.seed)
        for step in range(steps):
            undo = _spoil(runner, ctx, (spoilt or {}).get(str(step)))
            try:
                outputs.append(take_step(runner, step, cfg, ctx))
            except NonFiniteError as found:
                error = str(found)
                break
            finally:
                undo()
            digests.append(state_digest(runner))
            check_replicas(ctx, _held(runner))
        evaluated = runner.eval_step(micro_batches(steps, cfg, ctx))
        misrounded = _misrounded(runner)
    return {
        "loss": [*(output.loss for output in outputs), evaluated.loss / evaluated.count],
        "grad_norm": [output.grad_norm for output in outputs if not output.skipped],
        "scale": [output.loss_scale for output in outputs],
        "skipped": [output.skipped for output in outputs],
        "digest": digests,
        "types": sorted({str(parameter.dtype)[7:] for _, parameter in runner.named_parameters()}),
        "states": sorted({state for _, state in runner.optimizer_state()}),
        "misrounded": misrounded,
        "inexact_masters": inexact,
        "error": error,
    }


def start(plan: dict[str, Any], world_size: int, extra: dict[str, Any]) -> dict[str, float]:
    """Bytes that this rank's allocator had handed out at most while a model in bfloat16 was made, those that
    are left when it is made, and what the planner says of the most (and of masters in host memory, which on
    a CPU is the same)."""
    import gc

    import paddle
    from paddle.base import core

    from ppfleetx.planner.cards import load_card
    from ppfleetx.planner.communication import Cluster
    from ppfleetx.planner.job import job_of
    from ppfleetx.planner.memory import stage_memory
    from tests.helpers.low_precision import emulated

    options = {f"{OPTIONS}.enable": True, f"{OPTIONS}.dtype": "bfloat16", f"{OPTIONS}.level": "O2", **extra}
    card = load_card("A100-80GB")  # one with 16-bit parameters
    gc.collect()
    before = core.host_memory_stat_current_value("Allocated", 0)
    core.host_memory_stat_reset_peak_value("Allocated", 0)
    with paddle.utils.unique_name.guard(), emulated():
        cfg, ctx, runner = build(plan, world_size, "gpt", "adamw", 1, options)
        peak = core.host_memory_stat_peak_value("Allocated", 0) - before
        gc.collect()
        kept = core.host_memory_stat_current_value("Allocated", 0) - before
        job = replace(job_of(cfg, card), kernels="cpu")  # which counts the bytes that are asked for
        memory = stage_memory(job, Cluster(card), ctx.rank_on("pp"))
        states = runner.optimizer_state() if ctx.plan.sharding_offload else {}
    on_host = sum(4 * tensor.size for (_, name), tensor in states.items() if name == "master_weight")
    return {"peak": peak, "kept": kept, "predicted": memory.start - memory.context + on_host}


def state_digest(runner: Any) -> int:
    """A checksum of all weights and optimizer states (masters, moments, powers of beta)."""
    checksum = 0
    for _, tensor in [*runner.named_parameters(), *runner.optimizer_state().items()]:
        checksum = zlib.crc32(np.ascontiguousarray(tensor.numpy()).reshape(-1).view(np.uint8), checksum)
    return checksum


def program(values: Mapping[str, Any], world: int) -> str:
    """What tools/train.py does, with 16-bit kernels emulated; the user's error it ended with, or ""."""
    from tests.e2e.program import error_of
    from tests.e2e.program import train as run
    from tests.helpers.low_precision import emulated

    with emulated():
        return error_of(run, values, world)


def tensors_of(checkpoint: str) -> dict[str, str]:
    """Element type of each tensor in a checkpoint."""
    from ppfleetx.checkpoint.reader import open_checkpoint

    tensors = open_checkpoint(Path(checkpoint)).manifest.tensors
    return {"/".join(key): entry.dtype for key, entry in tensors.items()}


def _spoil(runner: Any, ctx: Any, name: str | None) -> Callable[[], None]:
    from ppfleetx.distributed.coordination import gather

    if name is None:
        return lambda: None
    parameter = dict(runner.named_parameters()).get(name)
    holders = [rank for rank, holds in enumerate(gather(ctx, parameter is not None)) if holds]
    if ctx.rank != holders[-1]:
        return lambda: None
    hook = parameter.register_hook(lambda gradient: gradient * float("inf"))
    return hook.remove


def _held(runner: Any) -> Any:
    parameters = dict(runner.named_parameters())
    for name, parameter in parameters.items():
        yield name, parameter, parameter.info
    for (name, state), tensor in runner.optimizer_state().items():
        yield f"{name}/{state}", tensor, parameters[name].info


def _inexact_masters(runner: Any, seed: int) -> list[str]:
    """Master weights that do not start as the float32 initial weights."""
    from ppfleetx.nn.init import draw

    infos = {name: parameter.info for name, parameter in runner.named_parameters()}
    masters = {name: m for (name, state), m in runner.optimizer_state().items() if state == "master_weight"}
    return [
        name
        for name, master in masters.items()
        for info in [infos[name]]
        if not np.array_equal(
            master.numpy(), draw(info.init, seed, name, info.global_shape, info.offset, info.local_shape)
        )
    ]


def _misrounded(runner: Any) -> list[str]:
    """Parameters updated here that are not their master weights, rounded."""
    parameters = dict(runner.named_parameters())
    return [
        name
        for (name, state), master in runner.optimizer_state().items()
        if state == "master_weight"
        and not np.array_equal(master.astype(parameters[name].dtype).numpy(), parameters[name].numpy())
    ]
