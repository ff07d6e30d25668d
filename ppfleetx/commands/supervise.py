"""The verb ``supervise``."""

from __future__ import annotations

import argparse
import shutil
from dataclasses import dataclass

from ppfleetx.commands.options import Command, option, positional
from ppfleetx.config.errors import ConfigError
from ppfleetx.resilience.supervisor import supervise, with_resume


@dataclass(frozen=True, kw_only=True)
class Supervise(Command):
    """Run a training command and start it again, a bounded number of times, when it fails.

        ppfleetx supervise --max-restarts 3 -- ppfleetx train -c FILE --nproc 4
        python tools/supervise.py -- python -m paddle.distributed.launch --nproc_per_node 4 \\
            tools/train.py -c FILE

    Each start has `-o Engine.save_load.resume=auto` added, unless the command says so itself, and so
    continues from the newest complete checkpoint, when nothing of the start before runs any more. A mistake
    of the user (exit code 2) and Ctrl-C (130) are not tried again; SIGTERM and Ctrl-C are passed on and end
    the supervisor too. Nothing the command started is left running.
    """

    max_restarts: int = option("how often to restart at most (default: 3)", default=3)
    backoff: float = option(
        "seconds to wait before the first restart, doubled each time (default: 5)", default=5.0
    )
    grace: float = option(
        "seconds that a stopped command has to save, before SIGKILL (default: 60)", default=60.0
    )
    command: tuple[str, ...] = positional(
        None, "the command to run, after --", default=(), nargs=argparse.REMAINDER
    )

    def run(self) -> int:
        """The exit code of the command's last start."""
        command = list(self.command[1:] if self.command[:1] == ("--",) else self.command)
        if not command:
            raise ConfigError("give the command to run after --")
        if shutil.which(command[0]) is None:
            raise ConfigError("there is no such program", key="COMMAND", value=command[0])
        for name in ("max_restarts", "backoff", "grace"):
            if not getattr(self, name) >= 0:
                key = f"--{name.replace('_', '-')}"
                raise ConfigError("must be at least 0", key=key, value=getattr(self, name))
        return supervise(
            with_resume(command),
            max_restarts=self.max_restarts,
            backoff=self.backoff,
            grace=self.grace,
        )
