"""Read files written by ``paddle.save`` (``.pdparams``), without running code from them."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ppfleetx.checkpoint.lazy_tensors import LazyTensor, derive
from ppfleetx.checkpoint.slices import Index
from ppfleetx.config.errors import CheckpointError, shown
from ppfleetx.conversion.safe_unpickler import (
    PADDLE_NAMES,
    PickledArray,
    WeightsUnpickler,
    reading,
    tensor_of,
)
from ppfleetx.utils.input_files import opened

_NAME_TABLE = "StructuredToParameterName@@"
_CHUNKED = "UnpackBigParamInfor@@"  # sic: Paddle's own spelling


def read_paddle_file(path: str | Path) -> dict[str, LazyTensor]:
    """Read the tensors of a Paddle state dict, by name, without running code from the file. A uint16 array
    is read as bfloat16. Objects that are not arrays are ignored.

    Raises RefusedPickleError if the file tries to run code; CheckpointError if the file is damaged.
    """
    path = Path(path)
    with opened(path) as file, reading(path):
        tree = WeightsUnpickler(file, PADDLE_NAMES).load()
        if not isinstance(tree, dict):
            raise CheckpointError("not a state dict")
        found = {str(name): _tensor(value) for name, value in tree.items()}
        tensors = {name: tensor for name, tensor in found.items() if tensor is not None}
        return _joined(tensors, tree.get(_CHUNKED) or {})


def _tensor(value: Any) -> LazyTensor | None:
    """Convert an array, or a pair (parameter name, array), to a lazy tensor; None for other objects."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str):
        value = value[1]
    return tensor_of(value.array, bfloat16_as_uint16=True) if isinstance(value, PickledArray) else None


def _joined(tensors: dict[str, LazyTensor], chunked: Mapping[str, Any]) -> dict[str, LazyTensor]:
    """Join the chunks of tensors that Paddle split because of their size.

    Args:
        tensors: all tensors, including the chunks, by name.
        chunked: name of a split tensor -> its original shape and the names of its chunks.
    """
    tensors.pop(_NAME_TABLE, None)
    for name, form in chunked.items():
        shape = tuple(map(operator.index, form["OriginShape"]))
        parts = [tensors.pop(part) for part in form["slices"]]
        if sum(prod(part.shape) for part in parts) != prod(shape):
            raise CheckpointError(f"the chunks of {shown(name)} do not add up to its shape {shown(shape)}")
        tensors[name] = derive(parts, shape, partial(_whole, shape), str(name))
    return tensors


def _whole(shape: Index, *parts: np.ndarray) -> np.ndarray:
    return np.concatenate([part.reshape(-1) for part in parts]).reshape(shape)
