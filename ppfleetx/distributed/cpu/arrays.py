"""NumPy views of Paddle's CPU tensors, and reductions whose results are bitwise equal on all ranks."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import numpy as np
import paddle

from ppfleetx.distributed.cpu.wire import CommError
from ppfleetx.utils.bfloat16 import from_bfloat16, to_bfloat16

# Paddle's types and NumPy's types of the same layout. NumPy has no bfloat16, so it is sent as uint16.
_DTYPES = {
    paddle.float32: np.float32,
    paddle.float64: np.float64,
    paddle.float16: np.float16,
    paddle.bfloat16: np.uint16,
    paddle.int8: np.int8,
    paddle.uint8: np.uint8,
    paddle.int16: np.int16,
    paddle.int32: np.int32,
    paddle.int64: np.int64,
    paddle.bool: np.bool_,
    paddle.complex64: np.complex64,
    paddle.complex128: np.complex128,
}
DTYPE_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
_NO_DTYPE = 255  # the code of operations without a tensor, such as barrier

SUM, MAX, MIN, PRODUCT = range(4)  # values of paddle.base.core.ReduceOp, without AVG, which is unused
_UFUNC = {SUM: np.add, MAX: np.maximum, MIN: np.minimum, PRODUCT: np.multiply}


def tensor_array(tensor: paddle.Tensor) -> np.ndarray:
    """Return a flat NumPy array that shares the tensor's memory; bfloat16 becomes uint16. Raises CommError if
    the tensor is not contiguous, or if its element type is not supported."""
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise CommError(f"tensors of {tensor.dtype} cannot be communicated")
    if not tensor.is_contiguous():
        raise CommError(f"the memory of a tensor of shape {list(tensor.shape)} is not contiguous")
    count = math.prod(tensor.shape)
    if count == 0:
        return np.empty(0, dtype)
    nbytes = count * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_char * nbytes).from_address(tensor.data_ptr()), dtype=dtype)


class TensorMemory:
    """The memory of the tensors that one collective reads and writes, as NumPy arrays. For a strided tensor,
    the array is a contiguous copy. After the collective, call :meth:`finish`, which writes the copies back to
    the tensors. ``code`` is the tensors' element type (:data:`DTYPE_CODES`)."""

    # Tests set this to False. Strided tensors then raise CommError, because NCCL does not accept them either.
    takes_strided = True

    def __init__(self) -> None:
        self.code = _NO_DTYPE
        self._owners: list[paddle.Tensor] = []
        self._strided: list[tuple[np.ndarray, np.ndarray]] = []

    def read(self, tensor: paddle.Tensor) -> np.ndarray:
        self._owners.append(tensor)
        self.code = DTYPE_CODES.get(tensor.dtype, _NO_DTYPE)
        if tensor.is_contiguous():
            return tensor_array(tensor)
        if not self.takes_strided:
            raise CommError(
                f"a strided tensor of shape {list(tensor.shape)} cannot be communicated: NCCL refuses it"
            )
        # Tensor.contiguous() would move the tensor itself to new memory. It would no longer be a view of its
        # base tensor.
        return np.ascontiguousarray(_strided_array(tensor)).reshape(-1)

    def write(self, tensor: paddle.Tensor) -> np.ndarray:
        """Return a flat array into which a collective writes its result for ``tensor``. Initially, the array
        has the contents of ``tensor``. Call :meth:`finish` when the result is complete."""
        array = self.read(tensor)
        if not tensor.is_contiguous():
            self._strided.append((_strided_array(tensor), array))
        return array

    def finish(self) -> None:
        for strided, array in self._strided:
            strided[...] = array.reshape(strided.shape)
        self._owners, self._strided = [], []


def _strided_array(tensor: paddle.Tensor) -> np.ndarray:
    dtype = np.dtype(_DTYPES[tensor.dtype])
    steps = [step * dtype.itemsize for step in tensor.strides]
    reach = sum(step * (size - 1) for step, size in zip(steps, tensor.shape, strict=True)) + dtype.itemsize
    memory = (ctypes.c_char * reach).from_address(tensor.data_ptr())
    return np.ndarray(tuple(tensor.shape), dtype, memory, strides=steps)


def byte_view(array: np.ndarray) -> memoryview:
    return memoryview(array.view(np.uint8))


def reduce_in_order(parts: Sequence[np.ndarray], out: np.ndarray, op: int, *, bfloat16: bool) -> None:
    """Reduce the arrays in the list ``parts`` elementwise into ``out``, in the order of the list. ``out`` can
    be one of these arrays. 16-bit floats are accumulated in float32.

    Args:
        op: SUM, MAX, MIN or PRODUCT of this module.
        bfloat16: whether the arrays, of type uint16, hold the bits of bfloat16 numbers.
    """
    ufunc, narrow = _UFUNC[op], bfloat16 or out.dtype == np.float16

    def widen(part: np.ndarray) -> np.ndarray:
        return from_bfloat16(part) if bfloat16 else part.astype(np.float32)

    if narrow:
        total = widen(parts[0])
        for part in parts[1:]:
            ufunc(total, widen(part), out=total)
    else:
        # If `out` is one of the later parts, the first sum must not overwrite it.
        late = any(np.shares_memory(out, part, max_work=1) for part in parts[2:])
        total = np.empty_like(out) if late else out
        ufunc(parts[0], parts[1], out=total)
        for part in parts[2:]:
            ufunc(total, part, out=total)
    if narrow:
        out[:] = to_bfloat16(total) if bfloat16 else total.astype(np.float16)
    elif total is not out:
        out[:] = total


def bounds(count: int, parts: int) -> list[int]:
    return [count * i // parts for i in range(parts + 1)]
