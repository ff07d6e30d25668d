"""Compile the C++ operators for CPUs.

Paddle's ``paddle.utils.cpp_extension`` is not used, because it needs Python's headers and a version of
setuptools that still has ``easy_install``.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import paddle

from ppfleetx.config.errors import UserError
from ppfleetx.nn.cpu_ops.compiled import OPTIONS, SOURCES, library_path
from ppfleetx.nn.cpu_ops.ops import load
from ppfleetx.utils.device_support import cpu_obstacle

_MINUTES = 10
_ONEDNN = "libdnnl.so.3"


def build(library: str) -> Path | None:
    """Compile a library of operators for this machine, unless it is already compiled. Return the path of the
    library; None if the processor or this build of Paddle does not support the operators.

    Raises:
        UserError: the library cannot be compiled, written or loaded.
    """
    has_onednn = (Path(paddle.sysconfig.get_lib()) / _ONEDNN).exists()
    if library == "bfloat16" and (cpu_obstacle("bfloat16") or not has_onednn):
        return None
    source, target = SOURCES[library], library_path(library)
    if target.exists() and load(library):
        return target
    compiler = find_compiler()
    try:
        target.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as directory:
            made = Path(directory) / target.name
            for command in _commands(compiler, source, made):
                _run(command)
            made.replace(target)
    except OSError as error:
        raise UserError(f"{target} cannot be written: {error.strerror or error}") from error
    load.cache_clear()
    if not load(library):
        target.unlink(missing_ok=True)
        raise UserError(f"the library made by {' '.join(compiler)} cannot be loaded")
    return target


def find_compiler() -> list[str]:
    """Return the command of a C++ compiler: ``CXX`` if it is set, else the first of c++ and g++ that exists.

    Raises:
        UserError: there is no compiler.
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
    if source == SOURCES["bfloat16"]:
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
