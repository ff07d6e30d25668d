"""Compiles the operators for decoding on a CPU.

Paddle's own way, ``paddle.utils.cpp_extension``, is left aside: it needs a setuptools that still has
``easy_install``, and Python's headers.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import paddle

from ppfleetx.config.errors import UserError
from ppfleetx.nn.cpu_ops.ops import SOURCE, WIDTH, library_path

_MINUTES = 10


def build() -> Path:
    """Compile the operators for this machine, unless that has been done; gives the library.

    Raises:
        UserError: there is no compiler, or it fails, or the library cannot be written.
    """
    target = library_path()
    if target.exists():
        return target
    compiler = find_compiler()
    if compiler is None:
        raise UserError("no C++ compiler was found (CXX, c++ or g++); install one, for instance g++")
    try:
        target.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as directory:
            library = Path(directory) / target.name
            for command in _commands(compiler, library):
                _run(command)
            library.replace(target)
    except OSError as error:
        raise UserError(f"{target} cannot be written: {error.strerror or error}") from error
    return target


def find_compiler() -> str | None:
    """The path of a C++ compiler."""
    names = (os.environ.get("CXX"), "c++", "g++")
    return next((path for name in names if name and (path := shutil.which(name))), None)


def _commands(compiler: str, library: Path) -> list[list[str]]:
    include, lib = Path(paddle.sysconfig.get_include()), Path(paddle.sysconfig.get_lib())
    base = lib.parent / "base"
    shared, compiled = library.with_name("libpaddle.so"), library.with_suffix(".o")
    options = ["-O3", "-march=native", "-std=c++17", "-fPIC", "-fopenmp", f"-DPANEL_WIDTH={WIDTH}", "-w"]
    # As Paddle was compiled: its headers choose by these.
    options += ["-DPADDLE_WITH_CUSTOM_KERNEL", "-D_GLIBCXX_USE_CXX11_ABI=1"]
    includes = [f"-I{include}", f"-I{include / 'third_party'}"]
    # Paddle's threads, where it brings them: a second library for OpenMP would start threads of its own.
    threads = "libiomp5.so"
    openmp = [f"-L{lib}", f"-l:{threads}"] if (lib / threads).exists() else ["-fopenmp"]
    paddle_library = [f"-L{base}", f"-l:{shared.name}", f"-Wl,-rpath,{base}:{lib}"]
    return [
        [compiler, *options, *includes, "-c", str(SOURCE), "-o", str(compiled)],
        [compiler, "-shared", str(compiled), *paddle_library, *openmp, "-o", str(library)],
    ]


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60 * _MINUTES)
    except subprocess.TimeoutExpired as error:
        raise UserError(f"the C++ compiler took more than {_MINUTES} minutes") from error
    if done.returncode:
        sys.stderr.write(done.stderr)
        raise UserError(f"the C++ compiler failed with code {done.returncode}: {' '.join(command)}")
