"""Optional C++ operators for decoding and training on a CPU. They are used if this command has compiled them:

    python -m ppfleetx.nn.cpu_ops

The command needs a C++ compiler. Without the operators, Paddle's operators and NumPy give the same results.
To remove compiled operators, delete the directory ``built``.
"""

from __future__ import annotations

import functools

import paddle
from paddle import _C_ops
from paddle.base import core

from ppfleetx.nn.cpu_ops.compiled import HOW_TO_MAKE, library_path
from ppfleetx.utils.log import get_logger

MOST_ROWS = 32
"""The largest number of rows for which ``few_rows`` is always faster than MKL. In dynamic mode, matmuls with
more rows use MKL."""
_HOW_TO_MAKE = f"{HOW_TO_MAKE} compiles operators for this CPU (needs a C++ compiler)"


@functools.cache
def load(library: str) -> bool:
    """Return whether an operator library is loaded. The first call loads it. If the library is compiled but
    cannot be loaded, a warning is logged."""
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


are_available = functools.partial(load, "ops")
"""Return whether the operators of this module can be called."""


def note_if_missing() -> None:
    """If the CPU operators are missing, log how to compile them."""
    if not are_available():
        get_logger().info(f"NOTE: batches are slower than necessary: {_HOW_TO_MAKE}")


def with_gradient(name: str, *operands: paddle.Tensor | float | None) -> paddle.Tensor:
    """Call the differentiable custom operator ``name``, and return its first result."""
    if not paddle.is_grad_enabled():  # Paddle 3.3 records custom operators regardless
        operands = tuple(one.detach() if isinstance(one, paddle.Tensor) else one for one in operands)
    return _C_ops._run_custom_op(name, *operands)[0]


def few_rows(
    x: paddle.Tensor, panels: paddle.Tensor, bias: paddle.Tensor | None, num_columns: int
) -> paddle.Tensor:
    """Return ``x [..., in] @ weight + bias`` for an ``x`` with few rows, float32 on a CPU, without gradients.

    Args:
        panels: ``weight [in, num_columns]`` in panels of adjacent columns, ``[panels, in, panel width]``,
            padded with zeros.
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
    """Apply top-p filtering to ``probabilities [b, vocabulary]``, float32 on a CPU. ``top_p`` is ``[1]``
    float32. :func:`ppfleetx.generation.logits_processors.nucleus` gives the same result."""
    return _C_ops._run_custom_op("ppfleetx_nucleus", probabilities, top_p)[0]


def cross_entropy(logits: paddle.Tensor, labels: paddle.Tensor) -> paddle.Tensor:
    """Return the cross entropy of each row of ``logits [..., columns]``, as ``[...]`` float64, with
    gradients. Logits are float32 on a CPU. A row with label -100 has loss 0."""
    return with_gradient("ppfleetx_cross_entropy", logits, labels)


def gelu_tanh(x: paddle.Tensor) -> paddle.Tensor:
    """Apply the tanh form of GELU, elementwise, with gradients. ``x`` is float32 on a CPU."""
    return with_gradient("ppfleetx_gelu", x)


def norm_gradients(
    x: paddle.Tensor, weight: paddle.Tensor, upstream: paddle.Tensor, *, centered: bool, epsilon: float
) -> list[paddle.Tensor]:
    """Return the gradients of LayerNorm (``centered``) or RMSNorm with respect to ``x [..., size]``, the gain
    ``weight [size]`` and the bias. Tensors are float32 on a CPU."""
    operands = (x.detach(), weight.detach(), upstream.contiguous())
    return _C_ops._run_custom_op("ppfleetx_norm_backward", *operands, centered, epsilon)
