"""Our own operators for decoding on a CPU, which are used if they have been compiled.

``few_rows`` multiplies few rows with a large matrix: eight rows with the matrices of a GPT of 124M parameters
take two thirds of the time of MKL's fastest method. ``grouped_product`` multiplies rows by the matrices of
their experts, without Paddle's slow loops. ``nucleus`` is top-p in one operation instead of eighty.
``few_rows.h`` and ``kernels.cc`` explain how. Further operators are in :mod:`~ppfleetx.nn.cpu_ops.quantized`,
for few bits, and :mod:`~ppfleetx.nn.cpu_ops.fused_blocks`, for all blocks of a model at once. They are
optional, and only an explicit command compiles them:

    python -m ppfleetx.nn.cpu_ops

This needs a C++ compiler and a few seconds; ``make`` runs it for its own environment. The library is for one
version of Paddle and one kind of CPU. Anywhere else it is not found, and Paddle's operations and NumPy give
the same results. To undo it, delete the directory ``built``.
"""

from __future__ import annotations

import functools
import hashlib
import platform
from pathlib import Path

import paddle
from paddle import _C_ops
from paddle.base import core

from ppfleetx.utils.log import get_logger
from ppfleetx.utils.machine import AVX512, flags_in, read_cpuinfo

WIDTH = 48 if flags_in(read_cpuinfo()) >= AVX512 else 16
"""Columns of a panel: one tile of MKL's kernels, three registers of float32 with AVX-512, two with AVX2."""
MOST_ROWS = 32
"""The most rows for which ``few_rows`` is surely faster than MKL; in dynamic mode MKL multiplies more
rows."""
OPTIONS = (
    *("-O3", "-march=native", "-std=c++17", "-fPIC", "-fopenmp", "-w", f"-DPANEL_WIDTH={WIDTH}"),
    *("-DPADDLE_WITH_CUSTOM_KERNEL", "-D_GLIBCXX_USE_CXX11_ABI=1"),  # Paddle's headers choose by these
)
"""Options of the compiler."""
_HOW_TO_MAKE = "python -m ppfleetx.nn.cpu_ops makes operators for this kind of CPU (it needs a C++ compiler)"
_NAMES = ("kernels", "quantized", "fused_blocks", "bfloat16")
SOURCES = {name: Path(__file__).with_name(f"{name}.cc") for name in _NAMES}
"""The source of each library: ``kernels`` has the operators of this file, the others those of the module with
their name."""
BUILT = Path(__file__).with_name("built")


def library_path(library: str) -> Path:
    """The path of a library for this Paddle, this kind of CPU and its source, whether or not it exists."""
    source = SOURCES[library]
    cpuinfo = read_cpuinfo()
    # Where Linux lists no flags (other processors than x86), the whole description is that of the kind.
    cpu = sorted(flags_in(cpuinfo)) or [platform.machine(), cpuinfo]
    kind = [paddle.__version__, paddle.version.commit, *OPTIONS, *cpu]
    texts = [path.read_bytes() for path in (source, *sorted(source.parent.glob("*.h")))]
    digest = hashlib.sha256(b"".join(texts) + " ".join(kind).encode())
    return BUILT / f"{library}-{digest.hexdigest()[:16]}.so"


@functools.cache
def load(library: str) -> bool:
    """Load a library of operators into Paddle, once. Return False if it is not compiled, or cannot be loaded,
    of which a warning says why."""
    path = library_path(library)
    if not path.exists():
        return False
    try:
        core.load_op_meta_info_and_register_op(str(path))
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        get_logger().warning(f"{path} cannot be loaded ({reason}); {_HOW_TO_MAKE}")
        return False
    return True


are_available = functools.partial(load, "kernels")
"""Whether the operators of this file can be called."""


def note_if_missing() -> None:
    """Log how to compile the operators if they are missing."""
    if not are_available():
        get_logger().info(f"NOTE: batches take longer than they need to: {_HOW_TO_MAKE}")


def few_rows(
    x: paddle.Tensor, panels: paddle.Tensor, bias: paddle.Tensor | None, num_columns: int
) -> paddle.Tensor:
    """``x [..., k] @ weight + bias``, float32 on a CPU, without gradients. ``panels`` is ``weight [k,
    num_columns]`` as ``[p, k, WIDTH]``, padded with zeros."""
    return _C_ops._run_custom_op("ppfleetx_few_rows", x, panels, bias, num_columns)[0]


def grouped_product(x: paddle.Tensor, weight: paddle.Tensor, counts: paddle.Tensor) -> paddle.Tensor:
    """Multiply rows ``x [n, k]``, sorted into groups, by the matrix of their group in ``weight [groups, k,
    columns]``: ``[n, columns]``, float32 on a CPU. ``counts [groups]`` int64 are the rows of each group."""
    return _C_ops._run_custom_op("ppfleetx_grouped_product", x, weight, counts)[0]


def nucleus(probabilities: paddle.Tensor, top_p: paddle.Tensor) -> paddle.Tensor:
    """:func:`ppfleetx.generation.processors.nucleus` for ``[b, V]`` float32 on CPU and ``top_p [1]``
    float32."""
    return _C_ops._run_custom_op("ppfleetx_nucleus", probabilities, top_p)[0]
