"""Implement ``pretrain_gpt.py`` and ``msrun`` in ``projects/mindspeed``, with the arguments of MindSpeed."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ppfleetx.commands.megatron_programs import train_translated
from ppfleetx.commands.options import whole_number
from ppfleetx.config.errors import ConfigError
from ppfleetx.dialects.megatron.dialect import without_launcher
from ppfleetx.dialects.mindspeed.dialect import file_of, of_file
from ppfleetx.dialects.translation import Translation
from ppfleetx.utils.end_processes import LAUNCHER
from ppfleetx.utils.lost_peers import START_VARIABLE
from ppfleetx.utils.output_files import writing

USAGE = """\
usage: pretrain_gpt.py [--yaml-cfg FILE] [Megatron's arguments, which replace what the file says]
       pretrain_gpt.py --check [--world-size N] ...     print plan, parameters and batches, and run nothing
Without a file it reads pretrain_gpt_38BV3.yaml of its own folder; docs/dialects/mindspeed.md lists all keys.
"""


def run(argv: Sequence[str], default: Path) -> None:
    """Run the program ``projects/mindspeed/pretrain_gpt.py``: train with the arguments of MindSpeed.
    ``default`` is the YAML file to read if ``argv`` names none.
    """

    def translate(arguments: list[str], world: int | None) -> Translation:
        path, rest = file_of(without_launcher(arguments)[1])
        return of_file(path or default, rest, world)

    train_translated(argv, USAGE, translate)


def msrun(argv: Sequence[str]) -> int:
    """Run a script on several ranks with Paddle's launcher. The arguments and the names of the log files are
    those of MindSpore's ``msrun``. Returns the launcher's exit code. With ``--join=False``, returns 0 without
    waiting for the ranks."""
    args = _parser().parse_args(list(argv))
    nodes, rest = divmod(args.worker_num, args.local_worker_num)
    if rest:
        raise ConfigError(
            f"must be a multiple of --local_worker_num {args.local_worker_num}, the ranks of each node",
            key="--worker_num",
            value=args.worker_num,
        )
    command = [sys.executable, "-m", LAUNCHER, "--nproc_per_node", str(args.local_worker_num)]
    if nodes > 1:
        command += ["--nnodes", str(nodes), "--master", f"{args.master_addr}:{args.master_port}"]
        command += [] if args.node_rank < 0 else ["--rank", str(args.node_rank)]
    log_dir = Path(args.log_dir)
    _name_logs(log_dir, args.local_worker_num)
    command += ["--log_dir", str(log_dir), args.script, *args.arguments]
    environment = {**os.environ}
    if args.cluster_time_out is not None:
        environment[START_VARIABLE] = str(args.cluster_time_out)
    if args.join:
        return subprocess.run(command, env=environment, check=False).returncode
    with (log_dir / "launcher.log").open("wb") as log:
        started = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    print(f"process {started.pid} starts {args.local_worker_num} workers; logs are in {log_dir}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="msrun", allow_abbrev=False, description="Start the ranks of a script."
    )
    add = parser.add_argument
    add("--worker_num", type=whole_number, default=8, metavar="N", help="ranks of the whole job (8)")
    add("--local_worker_num", type=whole_number, default=8, metavar="N", help="ranks of this node (8)")
    add("--master_addr", default="127.0.0.1", metavar="HOST", help="where nodes meet (127.0.0.1)")
    add("--master_port", type=int, default=8118, metavar="PORT", help="its port; one node needs none (8118)")
    add("--node_rank", type=int, default=-1, metavar="N", help="number of this node; -1: in order of arrival")
    add("--log_dir", default=".", metavar="DIR", help="gets worker_0.log, worker_1.log, ... (.)")
    add("--join", type=_truth, default=False, metavar="True|False", help="wait for the ranks (False)")
    add("--cluster_time_out", type=whole_number, metavar="S", help="seconds that ranks may start apart (600)")
    add("script", help="a Python program")
    add("arguments", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def _truth(text: str) -> bool:
    words = {"true": True, "1": True, "false": False, "0": False}
    if text.lower() not in words:
        raise argparse.ArgumentTypeError("must be True or False")
    return words[text.lower()]


def _name_logs(log_dir: Path, workers: int) -> None:
    with writing("--log_dir", log_dir):
        log_dir.mkdir(parents=True, exist_ok=True)
        for number in range(workers):
            link = log_dir / f"worker_{number}.log"
            if not link.is_symlink() and not link.exists():
                link.symlink_to(f"workerlog.{number}")
