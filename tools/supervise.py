#!/usr/bin/env python3
"""Run a training command and start it again, a bounded number of times, when it fails.

    python tools/supervise.py --max-restarts 3 -- \\
        python -m paddle.distributed.launch --nproc_per_node 4 tools/train.py -c FILE

Each start has `-o Engine.save_load.resume=auto` added, unless the command says so itself, and so continues
from the newest complete checkpoint, when nothing of the one before runs any more. A mistake of the user (exit
code 2) and Ctrl-C (130) are not tried again; SIGTERM and Ctrl-C are passed on and end the supervisor too.
Nothing the command started is left running.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ppfleetx.utils.cli import run_tool
from ppfleetx.utils.supervisor import supervise, with_resume


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--max-restarts", type=int, default=3, help="starts after the first")
    parser.add_argument("--backoff", type=float, default=5.0, help="seconds to the first restart; doubles")
    parser.add_argument("--grace", type=float, default=60.0, help="seconds to save, before SIGKILL")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- and the command")
    args = parser.parse_args()
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        parser.error("give the command to run after --")
    return supervise(
        with_resume(command),
        max_restarts=args.max_restarts,
        backoff=args.backoff,
        grace=args.grace,
    )


if __name__ == "__main__":
    run_tool(main)
