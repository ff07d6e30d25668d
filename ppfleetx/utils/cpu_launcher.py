"""Makes ``python -m paddle.distributed.launch`` (Paddle 3.3.1) usable on machines without a GPU.

    python -m ppfleetx.utils.cpu_launcher

writes one file, ``ppfleetx_cpu_launcher.pth``, into the site-packages of this Python environment. ``make``
does this for its own ``.venv``. To undo it, delete the file.

What it changes, and only in a process that is started as ``python -m paddle.distributed.launch``:

- ``--devices 0,1`` works without a GPU. Paddle looks these numbers up among the GPUs that it finds, and ends
  with ``ValueError: substring not found`` where there is none. If ``CUDA_VISIBLE_DEVICES`` lists the numbers,
  Paddle starts one process for each. So the variable is set to what ``--devices`` says.
- The launcher does not wait for ever, and its exit code says what happened (``launcher_watch.py``).

Why a ``.pth`` file: Python runs the ``import`` lines of such files when it starts, in every process of the
environment. That is the only place before Paddle's launcher that a project can reach without a command of its
own, and a command line with ``paddle.distributed.launch`` should run unchanged on every machine. In all other
processes the line compares one word and does nothing.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import MutableMapping, Sequence
from pathlib import Path

from ppfleetx.utils.devices import expected_device
from ppfleetx.utils.launcher_watch import watch_launcher
from ppfleetx.utils.processes import LAUNCHER_VARIABLE

LAUNCHER = "paddle.distributed.launch"
HOOK = "ppfleetx_cpu_launcher.pth"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
# Only a line that begins with `import` is run. An environment that lost ppfleetx must still start.
_LINE = (
    f"import sys; '{LAUNCHER}' in sys.orig_argv and __import__('importlib.util', fromlist=['util'])"
    ".find_spec('ppfleetx') and __import__('ppfleetx.utils.cpu_launcher', fromlist=['x']).apply()\n"
)


_prepared: set[int] = set()


def apply() -> None:
    """Prepare this process if it is the launcher, once: Python may meet the line twice (lib and lib64)."""
    options = launcher_options(sys.orig_argv)
    if options is not None:
        prepare(options)


def prepare(options: Sequence[str]) -> None:
    """Prepare this process, once, for being the launcher that was given these options."""
    if os.getpid() in _prepared:
        return
    _prepared.add(os.getpid())
    if expected_device("auto") == "cpu":
        name_devices([LAUNCHER, *options], os.environ)
    os.environ[LAUNCHER_VARIABLE] = str(os.getpid())
    watch_launcher(options)


def launcher_options(argv: Sequence[str]) -> list[str] | None:
    """What follows ``-m paddle.distributed.launch``; None where that is not what Python was told to run."""
    words = iter(range(1, len(argv)))
    for place in words:
        if argv[place] == "-m":
            return list(argv[place + 2 :]) if argv[place + 1 : place + 2] == [LAUNCHER] else None
        if argv[place] in ("-W", "-X"):
            next(words, None)
        elif not argv[place].startswith("-"):
            return None
    return None


def name_devices(argv: Sequence[str], environ: MutableMapping[str, str]) -> None:
    """Let as many devices be visible as a launcher's command line needs; a variable of the user's stays where
    it has them."""
    if LAUNCHER not in argv:
        return
    options = list(argv[argv.index(LAUNCHER) + 1 :])
    visible = environ.get(_VISIBLE, "").split(",")
    for place, option in enumerate(options):
        name, equals, value = option.partition("=")
        value = value if equals else "".join(options[place + 1 : place + 2])
        if name in ("--devices", "--gpus"):
            devices = value.replace(" ", "")
            if not set(devices.split(",")) <= set(visible):
                environ[_VISIBLE] = devices
        elif name == "--nproc_per_node" and value.isdecimal() and int(value) > len(visible):
            environ.pop(_VISIBLE, None)
        elif option.endswith(".py"):  # what follows belongs to the program
            return


def install(site_packages: Path | None = None) -> Path:
    """Write the line into ``site_packages`` (default: this environment's); gives the file."""
    path = (site_packages or Path(sysconfig.get_path("purelib"))) / HOOK
    path.write_text(_LINE, encoding="utf-8")
    return path


if __name__ == "__main__":
    print(f"wrote {install()}: Paddle's launcher takes --devices without a GPU build, and its waits end")
