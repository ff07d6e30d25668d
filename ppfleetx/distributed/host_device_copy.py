"""Copies between host and card. On a GPU, the host waits for the card only in :func:`read` and in the
functions that :func:`download` returns. All arrays of a micro batch are copied to the card in one
transfer."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import paddle

from ppfleetx.distributed.collectives import ALIGNMENT, aligned_offsets
from ppfleetx.distributed.device import on_card, queue_copy, queue_copy_to_host, recorded_event
from ppfleetx.resilience.flight_recorder import RECORD
from ppfleetx.resilience.progress import PROGRESS

_LOOKS_SECONDS = 1e-3  # polling interval for a card's progress

_on_their_way: deque[tuple[Any, Any]] = deque()
"""Copies to the card that may still be running, as (event after the copy, source in host memory), oldest
first. The source must stay alive until the copy is done."""
_begun: deque[Any] = deque()
"""Events at the start of micro batches that the card may not have begun yet, oldest first."""


# On a card, `paddle.to_tensor` would copy from pageable memory, and so wait for the card.
def upload(array: np.ndarray) -> paddle.Tensor:
    return _queue(array) if on_card() else paddle.to_tensor(array)


def upload_all(arrays: Mapping[str, np.ndarray]) -> dict[str, paddle.Tensor]:
    """Copy arrays to this process's device, and return the tensors by name. On a card, all arrays are copied
    in one transfer, and the tensors are views of one buffer. If ``FLAGS_use_stride_kernel`` is off, each
    array is copied separately."""
    has_views = paddle.get_flags("FLAGS_use_stride_kernel")["FLAGS_use_stride_kernel"]
    if not (on_card() and has_views and arrays):
        return {name: upload(array) for name, array in arrays.items()}
    flat, begins = _packed(arrays)
    return _unpacked(_queue(flat), arrays, begins)


def note_micro_batch() -> None:
    """Tell the hang detection that the host begins a micro batch. The card may begin the micro batch later;
    :func:`read` then reports that as progress, too."""
    PROGRESS.go_on()
    if on_card():
        while _begun and _begun[0].query():
            _begun.popleft()
        _begun.append(recorded_event())


def read(tensor: paddle.Tensor) -> np.ndarray:
    """Wait until the device has computed ``tensor``, and return its contents as an array (bfloat16 as uint16
    bits). Meanwhile, report progress to the hang detection whenever the card begins a micro batch."""
    with RECORD.reading():
        while _begun:
            if _begun[0].query():
                _begun.popleft()
                PROGRESS.go_on()
            else:
                time.sleep(_LOOKS_SECONDS)
        # Tensor.numpy would also wait for the card's other streams
        return download(tensor)()


def download(tensor: paddle.Tensor) -> Callable[[], np.ndarray]:
    """Start copying ``tensor`` to the host. Returns a function that waits for the copy and returns it as an
    array (bfloat16 as uint16 bits). Any thread can call that function. After this call, ``tensor`` may be
    overwritten."""
    if not on_card() or tensor.place.is_cpu_place():
        array = tensor.numpy()
        return lambda: array
    # The card executes a later change of the tensor after this copy.
    copy = queue_copy_to_host(tensor.detach().contiguous())
    behind = recorded_event()

    def arrived() -> np.ndarray:
        while not behind.query():  # polling, because waiting inside Paddle would block all other threads
            time.sleep(_LOOKS_SECONDS)
        return copy.numpy()

    return arrived


def _packed(arrays: Mapping[str, np.ndarray]) -> tuple[np.ndarray, dict[str, int]]:
    offsets, end = aligned_offsets([array.nbytes for array in arrays.values()], itemsize=1)
    begins = dict(zip(arrays, offsets, strict=True))
    flat = np.zeros(-(-end // ALIGNMENT) * ALIGNMENT, np.uint8)
    for name, array in arrays.items():
        begin = begins[name]
        flat[begin : begin + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return flat, begins


def _unpacked(
    flat: paddle.Tensor, arrays: Mapping[str, np.ndarray], begins: Mapping[str, int]
) -> dict[str, paddle.Tensor]:
    """Return tensors with the names, element types and shapes of ``arrays``, as parts of the byte tensor
    ``flat``. ``begins`` maps each name to the offset of its tensor in bytes."""
    # A view of a slice would be wrong: Paddle (3.3.1) misreads the slice's byte offset as an offset in
    # elements.
    typed = {array.dtype: flat.view(str(array.dtype)) for array in arrays.values()}
    tensors = {}
    for name, array in arrays.items():
        begin = begins[name] // array.itemsize
        tensors[name] = typed[array.dtype]._slice(begin, begin + array.size).reshape(array.shape)
    return tensors


def _queue(array: np.ndarray) -> paddle.Tensor:
    while _on_their_way and _on_their_way[0][0].query():
        _on_their_way.popleft()
    tensor, source = queue_copy(array)
    _on_their_way.append((recorded_event(), source))
    return tensor
