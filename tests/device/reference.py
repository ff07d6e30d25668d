"""The reference device: a plugin for Paddle's CPU wheel that behaves like an accelerator, and strictly.

``tests/device/README.md`` says what it does. :func:`plugin` compiles it when it is first needed;
:func:`environment` is what a process needs to see it; :class:`Device` talks to it from inside such a process.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from ppfleetx.config.errors import UserError

NAME = "npu"
"""Under which Paddle knows it: ``auto_cast`` computes in bfloat16 on plugins' devices of some names alone."""
SEED = "PPFLEETX_TEST_SEED"
SOURCES = Path(__file__).with_name("plugin")
BUILT = Path(__file__).with_name("built")
MACHINE = "x86_64"
"""Kernels are called through machine code, which is written for this processor."""
_FILES = ("stream.cc", "memory.cc", "collectives.cc", "device.cc", "kernels.cc", "calls_x86_64.S")
_OPTIONS = ("-O1", "-g", "-fPIC", "-std=c++17", "-w", "-DPADDLE_WITH_CUSTOM_DEVICE")
_MINUTES = 10
_LIBRARY = f"libpaddle-custom-{NAME}.so"
"""As plugins are called, so that ``auto`` finds it."""


def obstacle() -> str:
    """Why there can be no reference device here; "": there can."""
    if platform.machine() != MACHINE:
        return f"the reference device is written for {MACHINE}, and this is {platform.machine()}"
    if _is_cuda_build():
        return "the reference device needs Paddle's CPU wheel"
    return ""


def _is_cuda_build() -> bool:
    return any(one.metadata["Name"] == "paddlepaddle-gpu" for one in metadata.distributions())


@functools.cache
def plugin() -> Path:
    """The directory with the plugin for this Paddle and these sources, compiled if it is not there yet.

    Raises:
        UserError: there is no compiler, or it fails, or :func:`obstacle` has a reason.
    """
    if obstacle():
        raise UserError(obstacle())
    directory = BUILT / _digest()
    library = directory / _LIBRARY
    if not library.exists():
        BUILT.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILT) as scratch:
            made = _compile(Path(scratch))
            directory.mkdir(exist_ok=True)
            made.replace(library)  # at once: test workers may compile side by side
    return directory


def _digest() -> str:
    content = [path.read_bytes() for path in sorted(SOURCES.iterdir())]
    content.append(" ".join([metadata.version("paddlepaddle"), _LIBRARY, *_OPTIONS]).encode())
    return hashlib.sha256(b"".join(content)).hexdigest()[:16]


def _compile(scratch: Path) -> Path:
    from ppfleetx.nn.cpu_ops.build import find_compiler

    compiler = find_compiler()
    paddle = Path(find_spec("paddle").submodule_search_locations[0])
    includes = [f"-I{paddle / 'include'}", f"-I{paddle / 'include/third_party'}"]
    objects = [scratch / f"{name}.o" for name in _FILES]
    _run_all(
        [*compiler, *_OPTIONS, *includes, "-c", str(SOURCES / name), "-o", str(made)]
        for name, made in zip(_FILES, objects, strict=True)
    )
    library = scratch / _LIBRARY
    against = [f"-L{paddle / 'base'}", "-l:libpaddle.so", "-lpthread"]
    _run_all([[*compiler, "-shared", *map(str, objects), *against, "-o", str(library)]])
    return library


def _run_all(commands: Sequence[Sequence[str]]) -> None:
    """Run compilers side by side."""
    running = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    for process in running:
        _, said = process.communicate(timeout=60 * _MINUTES)
        if process.returncode:
            raise UserError(f"the C++ compiler failed with code {process.returncode}:\n{said}")


def environment(**options: int | str) -> dict[str, str]:
    """Variables of a process that has the reference device.

    Args:
        options: of ``plugin/options.h``, in lower case: ``memory=1 << 30, seed=3``.
    """
    given = {f"REFERENCE_DEVICE_{name.upper()}": str(value) for name, value in options.items()}
    # Each tensor is then an allocation of its own, which the device can watch.
    watched = (
        {"FLAGS_free_idle_chunk": "1", "FLAGS_free_when_no_cache_hit": "1"} if options.get("poison") else {}
    )
    return {"CUSTOM_DEVICE_ROOT": str(plugin()), "GLOG_minloglevel": "1", **watched, **given}


def strict(**options: str | int) -> dict[str, str]:
    """:func:`environment` of a device with all that makes races visible; ``PPFLEETX_TEST_SEED`` plays another
    order of events, or one again."""
    seed = os.environ.get(SEED, "1")
    delays = {"kernel_delay_us": 30, "copy_delay_us": 1000, "collective_delay_us": 2000}
    return environment(**{"poison": 1, "late_reads": 1, "seed": seed, **delays, **options})


class Device:
    """The device of this process, which :func:`environment` was given to."""

    def __init__(self) -> None:
        (library,) = Path(os.environ["CUSTOM_DEVICE_ROOT"]).glob("*.so")
        self._library = ctypes.CDLL(str(library))
        self._library.reference_device_counters.restype = ctypes.c_char_p
        for function in ("peak", "used"):
            getattr(self._library, f"reference_device_{function}").restype = ctypes.c_size_t
        self._library.reference_device_option.argtypes = [ctypes.c_char_p]
        self._library.reference_device_option.restype = ctypes.c_long
        self._library.reference_device_set.argtypes = [ctypes.c_char_p, ctypes.c_long]

    def set(self, option: str, value: int) -> None:
        """Change an option of ``plugin/options.h`` from now on."""
        if not self._library.reference_device_set(option.upper().encode(), value):
            raise KeyError(option)

    @contextlib.contextmanager
    def having(self, options: Mapping[str, int]) -> Iterator[None]:
        """Within, it has these options, and then those of before."""
        before = {
            option: self._library.reference_device_option(option.upper().encode()) for option in options
        }
        for option, value in options.items():
            self.set(option, value)
        try:
            yield
        finally:
            for option, value in before.items():
                self.set(option, value)

    def counters(self) -> dict[str, tuple[int, int]]:
        """How often each thing was done since :meth:`clear`, and for how many bytes."""
        return {
            name: tuple(pair) for name, pair in json.loads(self._library.reference_device_counters()).items()
        }

    def clear(self) -> None:
        """Begin to count anew, and to look for the peak of memory."""
        self._library.reference_device_clear_counters()
        self._library.reference_device_reset_peak()

    @property
    def peak(self) -> int:
        """Most bytes that were allocated at once since :meth:`clear`."""
        return self._library.reference_device_peak()

    @property
    def used(self) -> int:
        """Bytes that are allocated."""
        return self._library.reference_device_used()


def main() -> None:
    """Print what a process needs to have the device: ``python -m tests.device.reference poison=1``."""
    options = dict(word.split("=", 1) for word in sys.argv[1:])
    print(*(f"{name}={value}" for name, value in environment(**options).items()))


if __name__ == "__main__":
    main()
