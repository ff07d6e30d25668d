"""Settings of a process that make Paddle faster on CPUs. They must be applied before Paddle's first matrix
product. ``PPFLEETX_TUNE_CPU=0`` disables them. ``docs/numerics.md`` has measurements."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import io
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ppfleetx.utils.device_support import refused_at_import
from ppfleetx.utils.end_processes import end_with_launcher
from ppfleetx.utils.installed import not_installed
from ppfleetx.utils.log import get_logger
from ppfleetx.utils.machine import AVX512, available_cpus, flags_in, read_cpuinfo

SWITCH = "PPFLEETX_TUNE_CPU"

# glibc malloc.h: parameter numbers of mallopt(3), by the equivalent environment variables.
_MALLOC = {
    "MALLOC_MMAP_MAX_": (-4, 0),
    "MALLOC_TRIM_THRESHOLD_": (-1, 2**31 - 1),
    "MALLOC_TOP_PAD_": (-2, 64 << 20),
}

_TOO_LATE = (
    "CPU settings come too late, because Paddle is imported already: this run may take several times as "
    "long as it could. In your program, call prepare_process() of ppfleetx.utils.process_env before "
    "`import paddle`"
)


def mkl_cpu_type(cpuinfo: str) -> str | None:
    """Return the value of ``MKL_DEBUG_CPU_TYPE`` for an AMD processor: "7" for AVX-512, "5" for AVX2;
    otherwise None. ``cpuinfo`` is the content of ``/proc/cpuinfo``."""
    if "AuthenticAMD" not in cpuinfo:
        return None
    flags = flags_in(cpuinfo)
    if flags >= AVX512:
        return "7"
    return "5" if "avx2" in flags else None


def thread_count(environ: Mapping[str, str], num_cpus: int) -> int:
    """Return the number of compute threads of each rank: ``num_cpus`` divided by the number of ranks on this
    machine, but at least 1."""
    ranks_here = int(environ.get("PADDLE_LOCAL_SIZE") or environ.get("PADDLE_TRAINERS_NUM") or 1)
    return max(1, num_cpus // max(1, ranks_here))


# The result of the last call, and the variables that it set.
_said: str | None = None
_ours: dict[str, str] = {}


def prepare_process(*, device: str = "cpu") -> str:
    """Apply the settings of this module to this process, and return a line for the log that lists them.
    Variables that the user has set are kept. Call this before importing Paddle; afterwards, only the settings
    of malloc can be applied.

    With ``device="cpu"``, the number of threads and the way in which Paddle copies tensors are also set. If
    the process is a rank, it ends from now on when its launcher ends.
    """
    global _said
    end_with_launcher()
    if os.environ.get(SWITCH, "1") in {"0", "false", "off"}:
        return f"CPU settings: left alone ({SWITCH}={os.environ[SWITCH]})"
    if "paddle" not in sys.modules:
        done = [_set_mkl(), _set_malloc()]
        if device == "cpu":
            done += [_set_threads(), _set_contiguous_copies()]
    elif _said is None:
        # Changing FLAGS_use_stride_kernel now would make Paddle crash at the first strided tensor.
        done = [_set_malloc()]
        if device == "cpu":
            get_logger().warning(_TOO_LATE)
    else:
        return _said
    _said = "CPU settings: " + ", ".join(done) + f" ({SWITCH}=0 leaves them alone)"
    return _said


def _set_mkl() -> str:
    # By itself, Paddle's MKL uses only SSE on AMD processors.
    name = "MKL_DEBUG_CPU_TYPE"
    value = os.environ.get(name) if _set_by_user(name) else mkl_cpu_type(read_cpuinfo())
    return "MKL's own choice" if value is None else _set(name, value)


def _set_malloc() -> str:
    # By itself, malloc returns large blocks to the kernel after every operator, and the kernel must zero
    # them.
    kept = [name for name in _MALLOC if name in os.environ]
    mallopt = ctypes.CDLL(None).mallopt
    for name, (parameter, value) in _MALLOC.items():
        if name not in os.environ:
            mallopt(parameter, value)
    return "malloc keeps its memory" + (f" ({', '.join(kept)} yours)" if kept else "")


def _set_threads() -> str:
    name, value = "OMP_NUM_THREADS", str(thread_count(os.environ, available_cpus()))
    if _set_by_launcher(name):
        os.environ.pop(name, None)
    return _set(name, value)


def _set_contiguous_copies() -> str:
    # With strided views, Paddle's CPU kernels copy a transposed tensor element by element, up to 70 times
    # slower than the transpose kernel that is used without strided views.
    return _set("FLAGS_use_stride_kernel", "0")


def _set_by_user(name: str) -> bool:
    return os.environ.get(name) not in (None, _ours.get(name))


def _set(name: str, value: str) -> str:
    """Set an environment variable unless the user has set it. Returns its name and value, for the log."""
    if _set_by_user(name):
        return f"{name}={os.environ[name]} (yours)"
    os.environ[name] = _ours[name] = value
    return f"{name}={value}"


def _set_by_launcher(name: str) -> bool:
    """Return whether Paddle's launcher, and not the user, has set an environment variable of this rank."""
    if "PADDLE_LOCAL_SIZE" not in os.environ:
        return False
    # The launcher imports Paddle, which sets OMP_NUM_THREADS=1 for the ranks. /proc still shows the
    # environment with which the user started the launcher.
    try:
        given = Path(f"/proc/{os.getppid()}/environ").read_bytes()
    except OSError:
        return False
    return not any(entry.startswith(name.encode() + b"=") for entry in given.split(b"\0"))


def import_paddle() -> None:
    """Import Paddle, faster and with less output than the statement ``import paddle``. Raises
    NotInstalledError if Paddle is not installed, and ConfigError for a plugin that does not load or a card
    that does not exist."""
    if "paddle" in sys.modules:
        return
    with loading_paddle():
        try:
            importlib.import_module("paddle")
        except ModuleNotFoundError as error:
            raise not_installed(error) or error from None


@contextlib.contextmanager
def loading_paddle() -> Iterator[None]:
    """Context manager for importing Paddle. The import is faster, and its usual warnings are suppressed. Any
    other output to standard error is held back until the block ends. Raises ConfigError if a Paddle plugin
    does not load, or if the selected card does not exist."""
    if "paddle" in sys.modules:
        yield
        return
    said, on_sigterm = io.StringIO(), signal.getsignal(signal.SIGTERM)
    try:
        with (
            contextlib.redirect_stderr(said),
            warnings.catch_warnings(),
            _quick_imports(),
            _delayed_interrupt(),
        ):
            # Printed on every machine without a compiler cache, but nothing is compiled here.
            warnings.filterwarnings("ignore", message="No ccache found")
            yield
    except (ValueError, RuntimeError, OSError) as error:
        refused = None if "paddle" in sys.modules else refused_at_import(error)
        raise refused or error from None
    finally:
        _undo_root_logging(said)
        # The banner recommends OMP_NUM_THREADS=1 for ranks. thread_count() divides the cores among them
        # instead.
        banner = ("WARNING: OMP_NUM_THREADS set to", "PLEASE USE OMP_NUM_THREADS WISELY")
        for line in said.getvalue().splitlines():
            if not line.startswith(banner):
                print(line, file=sys.stderr)
    # Restore the handler of SIGTERM: Paddle's would print a C++ stack trace.
    if "paddle" in sys.modules and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL if on_sigterm is None else on_sigterm)


@contextlib.contextmanager
def _delayed_interrupt() -> Iterator[None]:
    """Context manager that delays Ctrl-C to the end of the block. While Paddle loads, Ctrl-C would become
    a misleading ``ImportError``. A second Ctrl-C takes effect at once."""
    before, came = signal.getsignal(signal.SIGINT), []
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return

    def hold(number: int, frame: Any) -> None:
        signal.signal(signal.SIGINT, before)
        came.append(number)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt


@contextlib.contextmanager
def _quick_imports() -> Iterator[None]:
    """Context manager that makes importing Paddle faster."""
    # httpx._main, which Paddle does not need, is hidden, because it loads a terminal library. Garbage
    # collection is off, because the imported objects are never garbage.
    collects, name = gc.isenabled(), "httpx._main"
    is_hidden = name not in sys.modules
    gc.disable()
    if is_hidden:
        sys.modules[name] = None
    try:
        yield
    finally:
        if is_hidden:
            del sys.modules[name]
        gc.freeze()
        if collects:
            gc.enable()


def _undo_root_logging(stream: io.StringIO) -> None:
    """Remove the handler for ``stream`` that Paddle's import has added to Python's root logger."""
    # Nobody reads `stream` after the import. Without the handler, messages of other libraries go to stderr.
    for handler in list(logging.root.handlers):
        if isinstance(handler, logging.StreamHandler) and handler.stream is stream:
            logging.root.removeHandler(handler)
            logging.root.setLevel(logging.WARNING)
