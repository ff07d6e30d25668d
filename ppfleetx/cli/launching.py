"""``--nproc N``: the verb runs in N processes, started by Paddle's launcher in this process.

The launcher shows the log of its first rank and, when a rank fails, the end of that one's. What the other
ranks write to their standard error is shown here as it comes, with the rank's number before each line.
"""

from __future__ import annotations

import argparse
import atexit
import runpy
import sys
import threading
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from ppfleetx.cli.marks import mark_of
from ppfleetx.utils.installed import not_installed

_LAUNCHER = "paddle.distributed.launch"
SCRIPT = Path(__file__).resolve().parent / "ranks" / "start.py"  # what each rank runs
_LOOK_SECONDS = 0.3
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

    prepare(options)
    errors = RankErrors(Path(args.log_dir or "log"))
    atexit.register(errors.show)
    threading.Thread(target=errors.follow, name="errors-of-ranks", daemon=True).start()
    sys.argv = [_LAUNCHER, *options, str(SCRIPT), verb, *without_launch_arguments(arguments)]
    runpy.run_module(_LAUNCHER, run_name="__main__", alter_sys=True)
    return 0


def without_launch_arguments(arguments: Sequence[str]) -> list[str]:
    """What of the typed arguments is for the ranks."""
    parser = argparse.ArgumentParser(add_help=False)
    add_launch_arguments(parser)
    return parser.parse_known_args(list(arguments))[1]


class RankErrors:
    """Lines that ranks but the first have marked as errors in their logs, from now on."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._lock = directory, threading.Lock()
        self._read = {path: path.stat().st_size for path in self._logs()}

    def follow(self) -> None:
        """Show what comes, until the process ends."""
        pause = threading.Event()
        while not pause.wait(_LOOK_SECONDS):
            self.show()

    def show(self) -> None:
        """Show what has come since."""
        with self._lock:
            for path in self._logs():
                self._show(path)

    def _logs(self) -> list[Path]:
        own = [path for path in sorted(self._directory.glob("workerlog.*")) if path.suffix != ".0"]
        return [path for path in own if path.suffix[1:].isdigit()]

    def _show(self, path: Path) -> None:
        with path.open("rb") as file:
            file.seek(self._read.get(path, 0))
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self._read[path] = self._read.get(path, 0) + len(whole)
        for line in whole.decode("utf-8", "replace").splitlines():
            if mark_of(line) is not None:
                print(line, file=sys.stderr, flush=True)
