"""From the host's memory to the device and back, without waiting for it.

``paddle.to_tensor`` of an ordinary array makes the host wait for a GPU: the copy leaves pageable memory, and
the host goes on when it is done. Here arrays go through pinned memory, all of a micro batch in one copy,
which is queued behind what the device already has to do; and what is to be kept comes back in the same way.
On a CPU there is nothing to wait for.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import paddle

from ppfleetx.utils.hangs.record import RECORD

_ALIGNMENT = 256  # bytes; as Paddle's own allocations

_PAUSE = 2e-3  # seconds between two questions whether a copy is there

_on_their_way: deque[tuple[Any, Any]] = deque()
"""(event behind a copy, its pinned memory), oldest first: memory must stay until its copy is done."""


def on_gpu() -> bool:
    """Whether tensors are made on a GPU."""
    return paddle.get_device().startswith("gpu")


def upload(array: np.ndarray) -> paddle.Tensor:
    """A copy of ``array`` on the device."""
    return _queue(array) if on_gpu() else paddle.to_tensor(array)


def upload_all(arrays: Mapping[str, np.ndarray]) -> dict[str, paddle.Tensor]:
    """Copies of the arrays on the device, on a GPU in one transfer: the tensors are then parts of one."""
    has_views = paddle.get_flags("FLAGS_use_stride_kernel")["FLAGS_use_stride_kernel"]
    if not (on_gpu() and has_views and arrays):
        return {name: upload(array) for name, array in arrays.items()}
    flat, begins = _packed(arrays)
    return _unpacked(_queue(flat), arrays, begins)


def read(tensor: paddle.Tensor) -> np.ndarray:
    """What the tensor holds, once the device has computed it; a rank that is missing there is told by the
    hang report.

    On a GPU ``Tensor.numpy`` would wait for all streams, and so for messages that nothing needs yet.
    """
    with RECORD.reading():
        return (_fetched(tensor) if on_gpu() else tensor).numpy()


def download(tensor: paddle.Tensor) -> Callable[[], np.ndarray]:
    """Start to copy what the tensor holds once the device has done all it was given so far.

    Returns:
        What waits for the copy and gives it, in any thread. Meanwhile the tensor may change: the device does
        that behind the copy. On a GPU the copy is in pinned memory; a bfloat16 array is of its bits, uint16.
    """
    if not on_gpu() or tensor.place.is_cpu_place():
        array = tensor.numpy()
        return lambda: array
    pinned = tensor.detach().contiguous()._copy_to(paddle.CUDAPinnedPlace(), False)
    behind = paddle.device.cuda.Event()
    behind.record()

    def arrived() -> np.ndarray:
        while not behind.query():  # waiting within Paddle would stop all other threads
            time.sleep(_PAUSE)
        return pinned.numpy()

    return arrived


def _packed(arrays: Mapping[str, np.ndarray]) -> tuple[np.ndarray, dict[str, int]]:
    """The arrays' bytes, one behind the other, and where each begins."""
    begins, end = {}, 0
    for name, array in arrays.items():
        begins[name] = end
        end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    flat = np.zeros(end, np.uint8)
    for name, array in arrays.items():
        begin = begins[name]
        flat[begin : begin + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return flat, begins


def _unpacked(
    flat: paddle.Tensor, arrays: Mapping[str, np.ndarray], begins: Mapping[str, int]
) -> dict[str, paddle.Tensor]:
    """Parts of ``flat`` in the types and shapes of ``arrays``.

    The whole is given another type and then cut: Paddle (3.3.1) takes the beginning of a part for a number of
    elements when the part is given another type.
    """
    typed = {array.dtype: flat.view(str(array.dtype)) for array in arrays.values()}
    tensors = {}
    for name, array in arrays.items():
        begin = begins[name] // array.itemsize
        tensors[name] = typed[array.dtype]._slice(begin, begin + array.size).reshape(array.shape)
    return tensors


def _fetched(tensor: paddle.Tensor) -> paddle.Tensor:
    """A copy in pinned memory, queued behind what computes the tensor, and waited for alone."""
    pinned = tensor.contiguous()._copy_to(paddle.CUDAPinnedPlace(), False)
    behind = paddle.device.cuda.Event()
    behind.record()
    behind.synchronize()
    return pinned


def _queue(array: np.ndarray) -> paddle.Tensor:
    """Queue a copy to the GPU."""
    while _on_their_way and _on_their_way[0][0].query():
        _on_their_way.popleft()
    pinned = paddle.to_tensor(array, place=paddle.CUDAPinnedPlace())
    tensor = pinned.cuda(blocking=False)
    behind = paddle.device.cuda.Event()
    behind.record()
    _on_their_way.append((behind, pinned))
    return tensor
