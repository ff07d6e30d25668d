"""Checks of ``ppfleetx doctor`` on the configuration: parallel plan, unsupported keys, whether a run can
start, and memory."""

from __future__ import annotations

from collections.abc import Iterator

from ppfleetx.config.errors import UserError
from ppfleetx.config.ineffective_options import missing, without_effect
from ppfleetx.core.engine.check_output_dir import check_start
from ppfleetx.distributed.device import is_card, kind_of, total_memory
from ppfleetx.doctor.results import Row, Target, fail, ok, skipped, warn
from ppfleetx.planner.cards import GIB
from ppfleetx.planner.prediction import run_prediction
from ppfleetx.planner.report import verdict
from ppfleetx.utils.device_support import not_supported_reasons
from ppfleetx.utils.gpu_operators import host_operator_notes
from ppfleetx.utils.machine import available_bytes


def plan(target: Target) -> Iterator[Row]:
    """Check that the job has as many processes as the parallel plan needs. Also report keys of the
    configuration that the device does not support or that have no effect."""
    cfg = target.cfg
    wanted, there = cfg.plan.world_size, target.world_size
    if wanted == there:
        yield ok("plan", f"{cfg.plan}: {there} processes")
    elif there == 1:
        yield skipped(
            "plan", f"{cfg.plan} is for {wanted} processes and this is one; --nproc {wanted} starts them"
        )
    else:
        yield fail(
            "plan",
            f"{cfg.plan} is for {wanted} processes, there are {there}",
            f"start {wanted}, or change the degrees: ppfleetx plan ranks the plans of {there}",
        )
    reasons = not_supported_reasons(cfg, target.device)
    if reasons:
        yield fail("supported", "; ".join(reasons), "change the keys that are named")
    for note in (*cfg.warnings, *without_effect(cfg), *host_operator_notes(cfg, kind_of(target.device))):
        yield warn("note", note, "remove the key, or make it take effect")
    for reason in missing(cfg):
        yield warn("missing", reason, "install it, or remove what needs it")


def start(target: Target) -> Iterator[Row]:
    if target.cfg.Data.Train is None:
        yield skipped("start", "the configuration trains nothing (no Data.Train)")
        return
    try:
        check_start(target.cfg)
    except UserError as error:
        yield fail("start", str(error), "follow the message, or give another output directory")
        return
    options = target.cfg.Engine.save_load
    how = "resumes from the newest checkpoint" if options.resume else "starts from the beginning"
    yield ok("start", f"a run in {options.output_dir} {how}")


def memory(target: Target) -> Iterator[Row]:
    """Check whether the device and the host have as much memory as the planner predicts for the run."""
    prediction = run_prediction(target.cfg, target.device)
    if prediction is None:
        yield skipped("memory", "the planner only knows the training of our own GPT")
        return
    needed, there = prediction.fullest, _there(target)
    if there is None:
        yield skipped("memory", f"Paddle does not report how much memory a {target.device} device has")
    else:
        yield memory_row(needed, *there, cpu=not is_card(target.device))
    host, free = max(stage.host for stage in prediction.memory), available_bytes()
    if is_card(target.device) and host and free is not None:
        of_node = host * target.local_size
        text = f"{of_node / GIB:.1f} GiB of host memory for states and copies while saving, "
        text += f"{free / GIB:.1f} GiB free"
        if of_node > free:
            yield warn("host memory", text, "switch Distributed.sharding.sharding_offload off, or save less")
        else:
            yield ok("host memory", text)


def memory_row(needed: float, there: float, name: str, *, cpu: bool) -> Row:
    """Return the report row that says whether a run fits into the memory of a device. Too little memory is a
    failure, but on a CPU only a warning.

    Args:
        needed: the memory that the run needs, in bytes.
        there: the memory that the device has, in bytes.
        name: the name of the device.
        cpu: whether the device is a CPU.
    """
    text = f"the fullest device needs about {needed / GIB:.1f} GiB: {verdict(needed, there, name)}"
    if needed <= there:
        return ok("memory", text, needed_gib=needed / GIB, there_gib=there / GIB)
    fix = "a smaller Global.micro_batch_size, Model.use_recompute, more devices; `ppfleetx plan` ranks them"
    # On a CPU this is only a warning, because other programs can free memory before the job starts.
    return (warn if cpu else fail)("memory", text, fix, needed_gib=needed / GIB, there_gib=there / GIB)


def _there(target: Target) -> tuple[float, str] | None:
    if is_card(target.device):
        return total_memory()
    return (available_bytes() or 0) / target.local_size, "this machine's free memory, shared by its processes"
