"""A fixed share of a core for each rank, so that four ranks on two cores are four devices of the same speed.

Ranks that compete for cores are not what a planner describes: while one waits for a message, another one is
faster. The kernel's CPU controller (cgroups, version 1 or 2) ends each rank's slice of every ``PERIOD``.

    python -m tests.planner.shares GROUP PROGRAM ARGUMENT ...    # joins GROUP + rank, then runs the program
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PERIOD = 2500
"""Microseconds. A rank waits for its next slice at most so long, a tenth of the steps that are measured."""


@contextmanager
def shares(ranks: int, share: float) -> Iterator[str]:
    """One group a rank, of ``share`` of a core each; gives what their directories begin with.

    The controller is shown in a directory outside ``/sys``, which ``ip netns exec`` mounts anew.

    Raises:
        OSError: no CPU controller that this user may write to.
        subprocess.CalledProcessError: mounting is not allowed.
    """
    version_1 = Path("/sys/fs/cgroup/cpu")
    source = version_1 if version_1.is_dir() else Path("/sys/fs/cgroup")
    root = Path(tempfile.mkdtemp(prefix="planner-shares-"))
    subprocess.run(["mount", "--bind", source, root], check=True)
    prefix = root / f"planner_links_{os.getpid()}_"
    groups = [Path(f"{prefix}{rank}") for rank in range(ranks)]
    try:
        for group in groups:
            group.mkdir()
            for name, value in _limits(share, source == version_1).items():
                (group / name).write_text(value)
        yield str(prefix)
    finally:
        for group in groups:
            if group.is_dir():
                group.rmdir()  # empty: its rank has ended
        subprocess.run(["umount", root], check=True)
        root.rmdir()


def _limits(share: float, version_1: bool) -> dict[str, str]:
    """A group's files: its slice of a period, and a weight that puts it ahead of whatever else runs."""
    quota = int(share * PERIOD)
    if version_1:
        return {"cpu.cfs_period_us": f"{PERIOD}", "cpu.cfs_quota_us": f"{quota}", "cpu.shares": "100000"}
    return {"cpu.max": f"{quota} {PERIOD}", "cpu.weight": "10000"}


def main() -> None:
    prefix, program, *arguments = sys.argv[1:]
    Path(f"{prefix}{os.environ['PADDLE_TRAINER_ID']}", "cgroup.procs").write_text(str(os.getpid()))
    sys.argv = [program, *arguments]
    sys.path[0] = str(Path(program).parent)
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
