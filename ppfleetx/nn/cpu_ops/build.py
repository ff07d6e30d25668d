"""Compiles the operators for CPUs.

It does not use Paddle's own ``paddle.utils.cpp_extension``, which needs Python's headers and a setuptools
that still has ``easy_install``.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import paddle

from ppfleetx.config.errors import UserError
from ppfleetx.nn.cpu_ops import bfloat16, fused_blocks, quantized
from ppfleetx.nn.cpu_ops.ops import (
    BFLOAT16_SOURCE,
    FUSED_BLOCKS_SOURCE,
    OPTIONS,
    QUANTIZED_SOURCE,
    SOURCE,
    are_available,
    library_path,
)
from ppfleetx.utils.devices import cpu_obstacle

_MINUTES = 10
_ONEDNN = "libdnnl.so.3"


def build() -> Path:
    """Compile the decoding operators for this machine if necessary; return the library's path.

    Raises:
        UserError: there is no compiler, it fails, or its result cannot be written or loaded.
    """
    return _build(SOURCE, library_path(), are_available)


def build_quantized() -> Path:
    """Compile the operators of :mod:`ppfleetx.nn.cpu_ops.quantized`."""
    return _build(QUANTIZED_SOURCE, library_path(QUANTIZED_SOURCE), quantized.are_available)


def build_trunk() -> Path:
    """Compile the operator of :mod:`ppfleetx.nn.cpu_ops.fused_blocks`."""
    return _build(FUSED_BLOCKS_SOURCE, library_path(FUSED_BLOCKS_SOURCE), fused_blocks.are_available)


def build_bfloat16() -> Path | None:
    """Compile the operators of :mod:`ppfleetx.nn.cpu_ops.bfloat16`; None if the processor has no such
    products, or this build of Paddle has no oneDNN."""
    if cpu_obstacle("bfloat16") or not (Path(paddle.sysconfig.get_lib()) / _ONEDNN).exists():
        return None
    return _build(BFLOAT16_SOURCE, library_path(BFLOAT16_SOURCE), bfloat16.are_available)


def _build(source: Path, target: Path, are_available: Callable[[], bool]) -> Path:
    if target.exists() and are_available():
        return target
    compiler = find_compiler()
    try:
        target.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as directory:
            library = Path(directory) / target.name
            for command in _commands(compiler, source, library):
                _run(command)
            library.replace(target)
    except OSError as error:
        raise UserError(f"{target} cannot be written: {error.strerror or error}") from error
    are_available.cache_clear()
    if not are_available():
        target.unlink(missing_ok=True)
        raise UserError(f"what {' '.join(compiler)} made cannot be loaded")
    return target


def find_compiler() -> list[str]:
    """The command of a C++ compiler: ``CXX`` if it is set, else the first one found.

    Raises:
        UserError: there is none.
    """
    wanted = shlex.split(os.environ.get("CXX", ""))
    if wanted:
        if shutil.which(wanted[0]) is None:
            raise UserError(f"the C++ compiler that CXX names was not found: {wanted[0]}")
        return wanted
    found = next((path for name in ("c++", "g++") if (path := shutil.which(name))), None)
    if found is None:
        raise UserError("no C++ compiler was found (CXX, c++ or g++); install one, for instance g++")
    return [found]


def _commands(compiler: list[str], source: Path, library: Path) -> list[list[str]]:
    include, lib = Path(paddle.sysconfig.get_include()), Path(paddle.sysconfig.get_lib())
    base = lib.parent / "base"
    compiled = library.with_suffix(".o")
    includes = [f"-I{include}", f"-I{include / 'third_party'}"]
    # Use Paddle's OpenMP library if it has one, because a second one would start its own threads.
    threads = "libiomp5.so"
    openmp = [f"-L{lib}", f"-l:{threads}"] if (lib / threads).exists() else ["-fopenmp"]
    paddle_library = [f"-L{base}", "-l:libpaddle.so", f"-Wl,-rpath,{base}:{lib}"]
    if source == BFLOAT16_SOURCE:
        paddle_library += [f"-L{lib}", f"-l:{_ONEDNN}"]
    return [
        [*compiler, *OPTIONS, *includes, "-c", str(source), "-o", str(compiled)],
        [*compiler, "-shared", str(compiled), *paddle_library, *openmp, "-o", str(library)],
    ]


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60 * _MINUTES)
    except subprocess.TimeoutExpired as error:
        raise UserError(f"the C++ compiler took more than {_MINUTES} minutes") from error
    except OSError as error:
        raise UserError(f"{command[0]} cannot be started: {error.strerror or error}") from error
    if done.returncode:
        sys.stderr.write(done.stderr)
        raise UserError(f"the C++ compiler failed with code {done.returncode}: {' '.join(command)}")
