"""Implement ``ppfleetx doctor``, which checks machine, network, data and devices before a job starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ppfleetx.commands.launching import SCRIPT, LaunchOptions
from ppfleetx.commands.options import OptionalConfigOptions, option, refuse_not_positive, switch
from ppfleetx.utils.launcher_env import local_rank, local_size, rank, world_size

if TYPE_CHECKING:
    from ppfleetx.doctor.results import Row, Target


@dataclass(frozen=True, kw_only=True)
class Doctor(LaunchOptions, OptionalConfigOptions):
    """Check everything a job needs before it starts. Prints a table of findings, and how to fix failures.

    Without options, it checks this machine: libraries, environment variables, Paddle, its kernels, the GPU,
    and the losses of tiny models. With -c, it also checks what that configuration needs: data, tokenizer,
    output directory and memory. With --nproc, it starts ranks as training does, compares their findings, and
    tests every collective in each process group of the plan. With --nnodes, it first checks that the machines
    can reach each other. The exit code is 1 if something failed, else 0.
    """

    examples = """\
examples:
  ppfleetx doctor
  ppfleetx doctor -c FILE --nproc 8
  ppfleetx doctor -c FILE --nproc 8 --nnodes 2 --master 10.0.0.1:8765     (the same on both machines)
  python -m paddle.distributed.launch --nproc_per_node 8 tools/doctor.py -c FILE
"""
    json: bool = switch("print one JSON object")
    timeout: float = option(
        "how long machines and processes wait for each other, and for their communication (120)",
        default=120.0,
        metavar="SECONDS",
    )

    def check_before_launch(self) -> None:
        """Do nothing. Other verbs raise UserError here; doctor reports the same errors in its table."""

    def launch(self, verb: str, arguments: Sequence[str]) -> int:
        """Check the network between machines, launch the ranks, and print a table of all findings. The ranks
        are launched by a child process, which runs this command again."""
        self.check_launch_options()
        refuse_not_positive(self, "timeout")
        from ppfleetx.doctor.libraries import broken_row

        try:
            from ppfleetx.doctor.launch import DIRECTORY_VARIABLE, job_rows
            from ppfleetx.utils.end_processes import end_child_with_parent
        except Exception as error:  # noqa: BLE001  (whatever a damaged library raises is a finding)
            return _show([broken_row(error)], 1, as_object=self.json)

        if DIRECTORY_VARIABLE in os.environ:  # this process is the child that launches the ranks
            end_child_with_parent()
            return super().launch(verb, arguments)
        logs = None if self.log_dir is None else Path(self.log_dir)
        command = [sys.executable, str(SCRIPT), "doctor", *arguments]
        place = self.nproc, self.nnodes, self.master
        rows, size = job_rows(command, *place, seconds=self.timeout, log_dir=logs)
        return _show(rows, size, as_object=self.json)

    def run(self) -> int:
        """Run the checks in this process, alone or as a rank of a job. Returns the exit code."""
        refuse_not_positive(self, "timeout")
        from ppfleetx.doctor.libraries import broken_row

        try:
            from ppfleetx.doctor.launch import DIRECTORY_VARIABLE, leave_report
            from ppfleetx.doctor.results import exit_code, in_groups
            from ppfleetx.doctor.run import examine_job

            target = _target(self)
        except ImportError as error:
            return _show([broken_row(error)], 1, as_object=self.json)
        directory = os.environ.get(DIRECTORY_VARIABLE, "")

        def finish(rows: list[Row]) -> None:
            if not directory and target.rank == 0:
                _show(rows, target.world_size, as_object=self.json)
            elif directory:
                leave_report(rows, target.world_size, directory, target.local_rank)

        if target.world_size == 1:
            rows = in_groups(_check_single_process(target))
        else:
            rows = examine_job(target, seconds=self.timeout, finish=finish)
        finish(rows)
        return 0 if directory else exit_code(rows)


def _check_single_process(target: Target) -> list[Row]:
    """Run the checks of one process. If Paddle cannot be imported, run only the checks that do not need
    Paddle."""
    from ppfleetx.doctor.launch import import_row
    from ppfleetx.doctor.registry import CHECKS
    from ppfleetx.doctor.run import examine_all

    problem = import_row() if "paddle" not in sys.modules and find_spec("paddle") is not None else None
    if problem is None:
        return examine_all(target)
    checks = [check for check in CHECKS if not check.imports_paddle]
    return [replace(problem, group="environment"), *examine_all(target, checks)]


def _target(options: Doctor) -> Target:
    """Return the target of the checks: this process's rank and device, and the configuration. If the
    configuration cannot be read, the target has a report row with the reason instead."""
    from ppfleetx.config.errors import UserError
    from ppfleetx.config.loader import load_config
    from ppfleetx.doctor.results import Target, fail
    from ppfleetx.utils.device_support import expected_device

    size, cfg, found, device = world_size(), None, [], expected_device("auto")
    try:
        if options.config is not None:
            cfg = load_config(options.config, options.override, world_size=size if size > 1 else None)
            device = expected_device(cfg.Global.device)
    except UserError as error:
        fix = "correct the key that is named; `ppfleetx check -c FILE` looks at the configuration alone"
        found.append(replace(fail("configuration", str(error), fix), group="configuration"))
    return Target(
        cfg,
        device,
        rank(),
        size,
        local_rank() if size > 1 else 0,
        local_size() or size,
        patience=options.timeout,
        found=tuple(found),
    )


def _show(rows: Sequence[Row], world_size: int, *, as_object: bool) -> int:
    from ppfleetx.doctor.results import as_json, as_table, exit_code

    print(as_json(rows, world_size) if as_object else as_table(rows), flush=True)
    return exit_code(rows)
