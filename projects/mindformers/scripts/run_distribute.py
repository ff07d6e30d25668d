#!/usr/bin/env python3
"""What run_distribute.sh does: become Paddle's launcher, with the arguments that the rank table says."""

import os
import sys
from pathlib import Path

_HERE = Path(__file__).resolve()
sys.path.insert(0, str(_HERE.parents[3]))

from ppfleetx.utils.exit_codes import run_tool


def main() -> None:
    from ppfleetx.config.loader import load_tree
    from ppfleetx.dialects.mindformers.dialect import run_of
    from ppfleetx.dialects.mindformers.rank_table import launch_of

    launch = launch_of(sys.argv[1:], os.environ)
    translation = run_of(launch.program).translation
    load_tree(translation.tree(), world_size=launch.world_size)  # mistakes are said before anything starts
    print(launch.says, flush=True)
    launcher = [sys.executable, "-m", "paddle.distributed.launch", *launch.launcher]
    program = str(_HERE.parents[1] / "run_mindformer.py")
    os.execv(sys.executable, [*launcher, program, *launch.program])  # noqa: S606 - no shell is wanted


if __name__ == "__main__":
    run_tool(main)
