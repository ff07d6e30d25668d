"""Our own C++ operators for decoding and training on a CPU. They are optional, and used if they are compiled:

    python -m ppfleetx.nn.cpu_ops

This needs a C++ compiler. Without the operators, Paddle's operators and NumPy give the same results. To
remove compiled operators, delete the directory ``built``.
"""

from __future__ import annotations

import functools
import hashlib
import platform
from pathlib import Path

import paddle
from paddle import _C_ops
from paddle.base import core

from ppfleetx.nn.cpu_ops.compiled import BUILT, HOW_TO_MAKE
from ppfleetx.utils.log import get_logger
from ppfleetx.utils.machine import AVX512, flags_in, read_cpuinfo

WIDTH = 48 if flags_in(read_cpuinfo()) >= AVX512 else 16
"""Number of columns of a panel, one tile of MKL's kernels: three registers of float32 with AVX-512, two with
AVX2."""
MOST_ROWS = 32
"""The most rows for which ``few_rows`` is always faster than MKL. In dynamic mode, products with more rows
use MKL."""
OPTIONS = (
    *("-O3", "-march=native", "-std=c++17", "-fPIC", "-fopenmp", "-w", f"-DPANEL_WIDTH={WIDTH}"),
    *("-DPADDLE_WITH_CUSTOM_KERNEL", "-D_GLIBCXX_USE_CXX11_ABI=1"),  # required by Paddle's headers
)
"""Options for the compiler."""
_HOW_TO_MAKE = f"{HOW_TO_MAKE} compiles operators for this CPU (needs a C++ compiler)"
_NAMES = ("kernels", "quantized", "fused_blocks", "bfloat16")
SOURCES = {name: Path(__file__).with_name(f"{name}.cc") for name in _NAMES}
"""Source file of each library. ``kernels`` has the operators of this module, each other library the operators
of the module with its name."""


def library_path(library: str) -> Path:
    """Return the path of an operator library, which may not be compiled yet."""
    # The name has a hash of Paddle's version, the options, the CPU and the source code, because a change of
    # any of them needs a new library.
    source = SOURCES[library]
    cpuinfo = read_cpuinfo()
    # On processors other than x86, Linux lists no flags; use the whole description.
    cpu = sorted(flags_in(cpuinfo)) or [platform.machine(), cpuinfo]
    kind = [paddle.__version__, paddle.version.commit, *OPTIONS, *cpu]
    texts = [path.read_bytes() for path in (source, *sorted(source.parent.glob("*.h")))]
    digest = hashlib.sha256(b"".join(texts) + " ".join(kind).encode())
    return BUILT / f"{library}-{digest.hexdigest()[:16]}.so"


@functools.cache
def load(library: str) -> bool:
    """Load an operator library at the first call. Return False if it is not compiled. If it cannot be loaded,
    log a warning and return False."""
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
"""Returns whether the operators of this module can be called."""


def note_if_missing() -> None:
    """If the CPU operators are missing, log how to compile them."""
    if not are_available():
        get_logger().info(f"NOTE: batches are slower than necessary: {_HOW_TO_MAKE}")


def with_gradient(name: str, *operands: paddle.Tensor | float | None) -> paddle.Tensor:
    """Return the first result of an operator that has a gradient."""
    if not paddle.is_grad_enabled():  # Paddle 3.3 records operators of a library even so
        operands = tuple(one.detach() if isinstance(one, paddle.Tensor) else one for one in operands)
    return _C_ops._run_custom_op(name, *operands)[0]


def few_rows(
    x: paddle.Tensor, panels: paddle.Tensor, bias: paddle.Tensor | None, num_columns: int
) -> paddle.Tensor:
    """Return ``x [..., in] @ weight + bias``, float32 on a CPU, without gradients.

    Args:
        panels: ``weight [in, num_columns]`` in blocks of columns, ``[blocks, in, panel width]``, padded with
            zeros.
    """
    return _C_ops._run_custom_op("ppfleetx_few_rows", x, panels, bias, num_columns)[0]


def grouped_product(x: paddle.Tensor, weight: paddle.Tensor, counts: paddle.Tensor) -> paddle.Tensor:
    """Multiply each row by the matrix of its group and return ``[rows, out]``, float32 on a CPU.

    Args:
        x: ``[rows, in]``, sorted by group.
        weight: ``[groups, in, out]``.
        counts: ``[groups]`` int64, number of rows of each group.
    """
    return _C_ops._run_custom_op("ppfleetx_grouped_product", x, weight, counts)[0]


def nucleus(probabilities: paddle.Tensor, top_p: paddle.Tensor) -> paddle.Tensor:
    """Apply top-p to ``probabilities [b, vocabulary]`` (float32 on CPU) with our C++ operator. ``top_p`` is
    ``[1]`` float32. The result is that of :func:`ppfleetx.generation.processors.nucleus`."""
    return _C_ops._run_custom_op("ppfleetx_nucleus", probabilities, top_p)[0]


def cross_entropy(logits: paddle.Tensor, labels: paddle.Tensor) -> paddle.Tensor:
    """Return the cross entropy of each row of ``logits [..., columns]`` with its gradient, ``[...]`` float64.
    Logits are float32 on a CPU. A row with label -100 has loss 0."""
    return with_gradient("ppfleetx_cross_entropy", logits, labels)


def gelu_tanh(x: paddle.Tensor) -> paddle.Tensor:
    """The tanh form of GELU with its gradient, elementwise, float32 on a CPU."""
    return with_gradient("ppfleetx_gelu", x)


def norm_gradients(
    x: paddle.Tensor, weight: paddle.Tensor, upstream: paddle.Tensor, *, centered: bool, epsilon: float
) -> list[paddle.Tensor]:
    """Return the gradients of ``x [..., size]``, the gain ``weight [size]`` and the bias of LayerNorm, or of
    RMSNorm if not ``centered``, float32 on a CPU."""
    operands = (x.detach(), weight.detach(), upstream.contiguous())
    return _C_ops._run_custom_op("ppfleetx_norm_backward", *operands, centered, epsilon)
