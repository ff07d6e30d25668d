"""Make ``python -m paddle.distributed.launch`` (Paddle 3.3.1) usable on machines without a GPU.

    python -m ppfleetx.utils.cpu_launcher

writes one file, ``ppfleetx_cpu_launcher.pth``, into the site-packages of this Python environment; ``make``
does so for its own ``.venv``. To undo it, delete the file.

In processes started as ``python -m paddle.distributed.launch``, and only there, it changes this:

- ``--devices 0,1`` works without a GPU. Paddle looks up these numbers among the GPUs and fails with
  ``ValueError: substring not found`` if there is none. But if ``CUDA_VISIBLE_DEVICES`` lists the numbers,
  Paddle starts one process for each, so the variable is set to the value of ``--devices``.
- The launcher never waits forever, its exit code says what happened, and after Ctrl-C it shows the first
  rank's last lines (``launcher_watch.py``).

Why a ``.pth`` file: Python runs the ``import`` lines of such files at start, in every process of the
environment. There is no other way to run code before Paddle's launcher without a command of our own, and
commands with ``paddle.distributed.launch`` should work unchanged on every machine. In all other processes,
the line only compares one word.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import MutableMapping, Sequence
from pathlib import Path

from ppfleetx.utils.devices import expected_device
from ppfleetx.utils.launcher_watch import option_of, watch_launcher
from ppfleetx.utils.processes import LAUNCHER_VARIABLE

LAUNCHER = "paddle.distributed.launch"
HOOK = "ppfleetx_cpu_launcher.pth"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
# Python runs only lines that begin with `import`. Without ppfleetx the environment must still work.
_LINE = (
    f"import sys; '{LAUNCHER}' in sys.orig_argv and __import__('importlib.util', fromlist=['util'])"
    ".find_spec('ppfleetx') and __import__('ppfleetx.utils.cpu_launcher', fromlist=['x']).apply()\n"
)


_prepared: set[int] = set()


def apply() -> None:
    """Prepare this process if it is the launcher. Python may call this twice (lib and lib64)."""
    options = launcher_options(sys.orig_argv)
    if options is not None:
        prepare(options)


def prepare(options: Sequence[str]) -> None:
    """Prepare this process, once, to be the launcher with these options."""
    if os.getpid() in _prepared:
        return
    _prepared.add(os.getpid())
    if expected_device("auto") == "cpu":
        name_devices(options, os.environ)
    os.environ[LAUNCHER_VARIABLE] = str(os.getpid())
    watch_launcher(options)


def launcher_options(argv: Sequence[str]) -> list[str] | None:
    """The arguments after ``-m paddle.distributed.launch``; None if Python runs something else."""
    words = iter(range(1, len(argv)))
    for place in words:
        if argv[place] == "-m":
            return list(argv[place + 2 :]) if argv[place + 1 : place + 2] == [LAUNCHER] else None
        if argv[place] in ("-W", "-X"):
            next(words, None)
        elif not argv[place].startswith("-"):
            return None
    return None


def name_devices(options: Sequence[str], environ: MutableMapping[str, str]) -> None:
    """Make as many devices visible as the command line needs, unless the user's variable already does."""
    visible = environ.get(_VISIBLE, "").split(",")
    devices = option_of(options, "--devices") or option_of(options, "--gpus")
    number = option_of(options, "--nproc_per_node") or ""
    if devices is not None:
        devices = devices.replace(" ", "")
        if not set(devices.split(",")) <= set(visible):
            environ[_VISIBLE] = devices
    elif number.isdecimal() and int(number) > len(visible):
        environ.pop(_VISIBLE, None)


def install(site_packages: Path | None = None) -> Path:
    """Write the file into ``site_packages`` (default: this environment's), and return its path."""
    path = (site_packages or Path(sysconfig.get_path("purelib"))) / HOOK
    path.write_text(_LINE, encoding="utf-8")
    return path


if __name__ == "__main__":
    print(f"wrote {install()}: Paddle's launcher accepts --devices without a GPU, and its waits end")
