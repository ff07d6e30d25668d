"""Run a training command and start it again, a bounded number of times, when it fails.

    ppfleetx supervise --max-restarts 3 -- ppfleetx train -c FILE --nproc 4
    python tools/supervise.py -- python -m paddle.distributed.launch --nproc_per_node 4 tools/train.py -c FILE

Each start has `-o Engine.save_load.resume=auto` added, unless the command says so itself, and so continues
from the newest complete checkpoint, when nothing of the one before runs any more. A mistake of the user (exit
code 2) and Ctrl-C (130) are not tried again; SIGTERM and Ctrl-C are passed on and end the supervisor too.
Nothing the command started is left running.
"""

from __future__ import annotations

import argparse
import shutil

from ppfleetx.config.errors import ConfigError
from ppfleetx.resilience.supervisor import supervise, with_resume


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    parser.add_argument("--max-restarts", type=int, default=3, help="starts after the first")
    parser.add_argument("--backoff", type=float, default=5.0, help="seconds to the first restart; doubles")
    parser.add_argument("--grace", type=float, default=60.0, help="seconds to save, before SIGKILL")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- and the command")


def run(args: argparse.Namespace) -> int:
    """The exit code of the command's last start."""
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise ConfigError("give the command to run after --")
    if shutil.which(command[0]) is None:
        raise ConfigError("there is no such program", key="COMMAND", value=command[0])
    for name in ("max_restarts", "backoff", "grace"):
        if not getattr(args, name) >= 0:
            key = f"--{name.replace('_', '-')}"
            raise ConfigError("must be at least 0", key=key, value=getattr(args, name))
    return supervise(
        with_resume(command),
        max_restarts=args.max_restarts,
        backoff=args.backoff,
        grace=args.grace,
    )
