"""``--nproc N``: the verb runs in N processes, started by Paddle's launcher in this process.

The launcher shows the log of its first rank and, when a rank fails, the end of that one's. What the other
ranks write to their standard error is shown here as it comes, with the rank's number before each line.
"""

from __future__ import annotations

import argparse
import atexit
import os
import runpy
import sys
import threading
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from ppfleetx.cli.marks import mark_of, without_mark
from ppfleetx.config.counts import counted
from ppfleetx.config.errors import ConfigError
from ppfleetx.utils.installed import not_installed

_LAUNCHER = "paddle.distributed.launch"
SCRIPT = Path(__file__).resolve().parent / "ranks" / "start.py"  # what each rank runs
_LOOK_SECONDS = 0.3
_SAME_SECONDS = 2.0  # ranks that find the same mistake are at most so far apart
_OPTIONS = {
    "nproc": "--nproc_per_node",
    "devices": "--devices",
    "nnodes": "--nnodes",
    "master": "--master",
    "log_dir": "--log_dir",
}


def _count(text: str) -> int:
    """1 or more, of an option, for argparse."""
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text} is not a whole number, 1 or more")
    return int(text)


def add_launch_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--nproc`` and what goes with it."""
    add = parser.add_argument_group("several processes (paddle.distributed.launch)").add_argument
    add("--nproc", type=_count, metavar="N", help="processes on this machine")
    add("--devices", metavar="0,1,...", help="cards of this machine, one process each")
    add("--nnodes", type=_count, metavar="N", help="machines; start the same command on each, with --master")
    add("--master", metavar="HOST:PORT", help="the first machine, and a free port there")
    add("--log-dir", metavar="DIR", help="logs of the processes, workerlog.N (log)")


def add_max_steps(parser: argparse.ArgumentParser) -> None:
    """Add ``--max-steps`` of the verbs that train."""
    parser.add_argument(
        "--max-steps",
        type=_count,
        metavar="N",
        help="train to step N; a run in the output directory, also one that has ended, goes on to there",
    )


def is_launched(args: argparse.Namespace) -> bool:
    """Whether the arguments ask for processes of their own."""
    return any(getattr(args, name, None) is not None for name in ("nproc", "devices", "nnodes"))


def launch(verb: str, args: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Start the ranks and wait for them; ends this process with the launcher's exit code.

    Args:
        verb: what each rank does.
        args: the arguments, parsed.
        arguments: the same as they were typed.
    """
    if find_spec("paddle") is None:
        raise not_installed(ModuleNotFoundError(name="paddle"))
    options = [
        word
        for name, option in _OPTIONS.items()
        if getattr(args, name) is not None
        for word in (option, str(getattr(args, name)))
    ]
    from ppfleetx.utils.cpu_launcher import prepare
    from ppfleetx.utils.process_env import import_paddle

    if verb != "doctor":  # which reports what is wrong as one of its rows
        _refuse_what_every_rank_would(verb, args)
    prepare(options)
    import_paddle()
    _refuse_absent_cards(args)
    errors = RankErrors(Path(args.log_dir or "log"))
    atexit.register(errors.show)
    threading.Thread(target=errors.follow, name="errors-of-ranks", daemon=True).start()
    sys.argv = [_LAUNCHER, *options, str(SCRIPT), verb, *without_launch_arguments(arguments)]
    runpy.run_module(_LAUNCHER, run_name="__main__", alter_sys=True)
    return 0


def _refuse_what_every_rank_would(verb: str, args: argparse.Namespace) -> None:
    """Raise once, before any rank starts: a mistake in the configuration, or a model that is not there."""
    checkpoint = getattr(args, "checkpoint", None)
    if checkpoint is not None:
        from ppfleetx.commands.resolve_model import refuse_absent

        refuse_absent(checkpoint)
    elif args.config is not None:
        from ppfleetx.config.loader import load_config

        here = args.nproc or (len(args.devices.split(",")) if args.devices else None)
        nodes = args.nnodes or int(os.environ.get("PADDLE_NNODES") or 1)
        size = None if here is None or verb == "infer" else here * nodes  # any number may serve an export
        load_config(args.config, args.override, world_size=size)


def _refuse_absent_cards(args: argparse.Namespace) -> None:
    """Raise where there are fewer cards than ranks. Paddle's launcher would end with a traceback."""
    from paddle.distributed.launch.context.device import Device

    visible = Device.parse_device().labels  # empty without cards, [""] where none is visible
    there = [one for one in visible if one]
    named = [one.strip() for one in args.devices.split(",")] if args.devices else there
    absent = [one for one in named if one not in there]
    if visible and absent:
        raise ConfigError(
            f"there is no card {', '.join(absent)}; this process may use {', '.join(there) or 'none'}",
            key="--devices",
            value=args.devices,
        )
    if visible and (args.nproc or 0) > len(named):
        which = "--devices names" if args.devices else "this process may use"
        shown = (
            f" ({', '.join(named)}); give --nproc {len(named)}"
            if named
            else ": is ..._VISIBLE_DEVICES empty?"
        )
        raise ConfigError(
            f"each process needs a card, and {which} {counted(len(named), 'card')}{shown}",
            key="--nproc",
            value=args.nproc,
        )


def without_launch_arguments(arguments: Sequence[str]) -> list[str]:
    """What of the typed arguments is for the ranks."""
    parser = argparse.ArgumentParser(add_help=False)
    add_launch_arguments(parser)
    return parser.parse_known_args(list(arguments))[1]


class RankErrors:
    """Lines that ranks but the first have marked as errors in their logs, from now on.

    Of ranks that say the same error, one is shown: the first rank, which the launcher shows, or else another.
    """

    def __init__(self, directory: Path) -> None:
        self._directory, self._lock = directory, threading.Lock()
        self._read = {path: path.stat().st_size for path in self._logs()}
        self._said: set[str] = set()  # errors that have been shown
        self._held: list[tuple[float, str]] = []  # errors that the first rank may say too, and since when

    def follow(self) -> None:
        """Show what comes, until the process ends."""
        pause = threading.Event()
        while not pause.wait(_LOOK_SECONDS):
            self.show(_SAME_SECONDS)

    def show(self, hold_seconds: float = 0.0) -> None:
        """Show what has come since, errors when they are as old as this."""
        with self._lock:
            for path in self._logs():
                lines = self._new_lines(path)
                if path.suffix == ".0":  # the launcher shows this one
                    self._said.update(filter(_is_error, map(without_mark, lines)))
                    continue
                for line in (line for line in lines if mark_of(line) is not None):
                    if _is_error(without_mark(line)):
                        self._held.append((time.monotonic(), line))
                    else:
                        print(line, file=sys.stderr, flush=True)
            due = [line for since, line in self._held if time.monotonic() - since >= hold_seconds]
            self._held = [(since, line) for since, line in self._held if line not in due]
            for line in due:
                if without_mark(line) not in self._said:
                    self._said.add(without_mark(line))
                    print(line, file=sys.stderr, flush=True)

    def _logs(self) -> list[Path]:
        return [path for path in sorted(self._directory.glob("workerlog.*")) if path.suffix[1:].isdigit()]

    def _new_lines(self, path: Path) -> list[str]:
        with path.open("rb") as file:
            file.seek(self._read.get(path, 0))
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self._read[path] = self._read.get(path, 0) + len(whole)
        return whole.decode("utf-8", "replace").splitlines()


def _is_error(line: str) -> bool:
    return line.startswith("error: ")
