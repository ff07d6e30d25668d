"""Run a verb (subcommand) in N processes (``--nproc N``) with Paddle's launcher.

The launcher runs in this process. It shows the log of its first rank and, if a rank fails, the end of that
rank's log.
"""

from __future__ import annotations

import argparse
import io
import os
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path

from ppfleetx.commands.options import Command, flags_of, option, whole_number
from ppfleetx.config.errors import ConfigError, naming
from ppfleetx.config.message_text import counted
from ppfleetx.utils.end_processes import LAUNCHER
from ppfleetx.utils.installed import not_installed
from ppfleetx.utils.launcher_env import is_rank, rank
from ppfleetx.utils.output_files import refuse_unwritable

SCRIPT = Path(__file__).resolve().parents[1] / "__main__.py"
"""The file that each rank runs, with a verb and its arguments."""
_GROUP = f"several processes ({LAUNCHER})"


@dataclass(frozen=True, kw_only=True)
class LaunchOptions(Command):
    """Base class of verbs (subcommands) that can run in several processes. It has ``--nproc`` and
    related options."""

    nproc: int | None = option("processes on this machine", type=whole_number, group=_GROUP)
    devices: str | None = option("cards of this machine, one process each", metavar="0,1,...", group=_GROUP)
    nnodes: int | None = option(
        "machines; start the same command on each, with --master", type=whole_number, group=_GROUP
    )
    master: str | None = option("the first machine, and a free port there", metavar="HOST:PORT", group=_GROUP)
    log_dir: str | None = option(
        "directory for the processes' logs, workerlog.N (default: log)", metavar="DIR", group=_GROUP
    )

    @property
    def is_launched(self) -> bool:
        """Whether the options ask to run the verb (subcommand) in separate processes."""
        return (self.nproc, self.devices, self.nnodes) != (None, None, None)

    def launch(self, verb: str, arguments: Sequence[str]) -> int:
        """Run the ranks with Paddle's launcher, which then ends this process with its exit code. Subclasses
        can return an exit code instead."""
        self.check_launch_options()
        if find_spec("paddle") is None:
            raise not_installed(ModuleNotFoundError(name="paddle"))
        from ppfleetx.utils.cpu_launcher import prepare
        from ppfleetx.utils.process_env import import_paddle

        self.check_before_launch()
        names = {"nproc_per_node": self.nproc, "devices": self.devices, "nnodes": self.nnodes}
        names |= {"master": self.master, "log_dir": self.log_dir}
        given = {f"--{name}": str(value) for name, value in names.items() if value is not None}
        options = [word for pair in given.items() for word in pair]
        prepare(options)
        import_paddle()
        _refuse_absent_cards(self)
        sys.argv = [LAUNCHER, *options, str(SCRIPT), verb, *without_launch_options(arguments)]
        runpy.run_module(LAUNCHER, run_name="__main__", alter_sys=True)
        return 0

    def check_before_launch(self) -> None:
        """Check for errors that every rank would raise, such as errors in the configuration. Raises UserError
        before any rank starts, so that the user sees the message only once."""
        if (self.nnodes or 1) > 1 and not (self.master or os.environ.get("PADDLE_MASTER")):
            raise ConfigError(
                "several machines need --master HOST:PORT: the first one, and a free port there",
                key="--nnodes",
                value=self.nnodes,
            )
        checkpoint, config = getattr(self, "checkpoint", None), getattr(self, "config", None)
        if checkpoint is not None:
            from ppfleetx.commands.resolve_model import refuse_absent

            [one] = [one for one in fields(self) if one.name == "checkpoint"]
            with naming((*flags_of(one), "CHECKPOINT")[0], checkpoint):
                refuse_absent(checkpoint)
        elif config is not None:
            from ppfleetx.config.loader import load_config

            load_config(config, self.override, world_size=self.num_processes)

    def check_launch_options(self) -> None:
        """Raise ConfigError if the log directory is not writable or ``--devices`` is not a list of
        numbers."""
        if self.log_dir is not None:
            refuse_unwritable(Path(self.log_dir), "--log-dir")
        if self.devices is not None and not all(one.strip().isdecimal() for one in self.devices.split(",")):
            raise ConfigError(
                "must be card numbers, separated by commas", key="--devices", value=self.devices
            )

    @property
    def num_processes(self) -> int | None:
        """The number of processes of the whole job, or None if the options do not set it: each card then gets
        one process."""
        here = self.nproc or (len(self.devices.split(",")) if self.devices else None)
        return None if here is None else here * (self.nnodes or int(os.environ.get("PADDLE_NNODES") or 1))


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(LaunchOptions):
    """Base class of verbs (subcommands) that train. It has the options for several processes, and
    ``--max-steps``."""

    max_steps: int | None = option(
        "train until step N; an existing run in the output directory, even a finished one, is continued to "
        "that step",
        type=whole_number,
    )


def _refuse_absent_cards(options: LaunchOptions) -> None:
    """Raise ConfigError if there are fewer cards than ranks, or ``--devices`` names a card that is absent.
    Does nothing on a machine without cards."""
    from paddle.distributed.launch.context.device import Device

    visible = Device.parse_device().labels  # empty without cards, [""] if none is visible
    there = [one for one in visible if one]
    named = [one.strip() for one in options.devices.split(",")] if options.devices else there
    absent = [one for one in named if one not in there]
    if visible and absent:
        raise ConfigError(
            f"there is no card {', '.join(absent)}; this process may use {', '.join(there) or 'none'}",
            key="--devices",
            value=options.devices,
        )
    if visible and (options.nproc or 0) > len(named):
        which = "--devices names" if options.devices else "this process may use"
        shown = (
            f" ({', '.join(named)}); give --nproc {len(named)}"
            if named
            else ": is ..._VISIBLE_DEVICES empty?"
        )
        raise ConfigError(
            f"each process needs a card, and {which} {counted(len(named), 'card')}{shown}",
            key="--nproc",
            value=options.nproc,
        )


def without_launch_options(arguments: Sequence[str]) -> list[str]:
    """Return the command-line arguments of a rank, which are ``arguments`` without ``--nproc`` and related
    options."""
    parser = argparse.ArgumentParser(add_help=False)
    for one in fields(LaunchOptions):
        parser.add_argument(*flags_of(one))
    return parser.parse_known_args(list(arguments))[1]


def mark_errors() -> None:
    """Put ``[rank N] `` before each line of standard error, if this process is a rank of a job."""
    if is_rank():
        sys.stderr = MarkedStream(sys.stderr, rank())


class MarkedStream(io.TextIOBase):
    """A text stream that writes to ``stream``, with ``[rank N] `` before each line."""

    def __init__(self, stream: io.TextIOBase, rank: int) -> None:
        self._stream, self._mark, self._at_start = stream, f"[rank {rank}] ", True

    def write(self, text: str) -> int:
        lines = text.splitlines(keepends=True)
        for line in lines:
            self._stream.write(f"{self._mark}{line}" if self._at_start else line)
            self._at_start = line.endswith("\n")
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    def isatty(self) -> bool:
        return self._stream.isatty()
