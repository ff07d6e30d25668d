"""Pickled state dicts of Paddle (``.pdparams``)."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ppfleetx.checkpoint.lazy import LazyTensor, derive
from ppfleetx.checkpoint.slices import Index
from ppfleetx.config.errors import CheckpointError, shown
from ppfleetx.conversion.pickles import (
    PADDLE_NAMES,
    PickledArray,
    WeightsUnpickler,
    reading,
    tensor_of,
)
from ppfleetx.utils.untrusted_files import opened

_NAME_TABLE = "StructuredToParameterName@@"
_CHUNKED = "UnpackBigParamInfor@@"  # sic: Paddle's own spelling


def read_paddle_file(path: str | Path) -> dict[str, LazyTensor]:
    """Read the tensors of a state dict that Paddle saved, by name. Anything else in it is left out.

    Paddle saves bfloat16 as unsigned 16-bit integers; they are read as bfloat16.

    Raises:
        RefusedPickleError: the file tries to run code; nothing has been run.
        CheckpointError: the file cannot be read, or is not a state dict of Paddle.
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
    """The tensor in an array, or in the pair (parameter name, array) in which Paddle saves a Tensor."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str):
        value = value[1]
    return tensor_of(value.array, bfloat16_as_uint16=True) if isinstance(value, PickledArray) else None


def _joined(tensors: dict[str, LazyTensor], chunked: Mapping[str, Any]) -> dict[str, LazyTensor]:
    """Join the tensors that old pickle protocols forced Paddle to write in pieces."""
    tensors.pop(_NAME_TABLE, None)
    for name, form in chunked.items():
        shape = tuple(map(operator.index, form["OriginShape"]))
        parts = [tensors.pop(part) for part in form["slices"]]
        if sum(prod(part.shape) for part in parts) != prod(shape):
            raise CheckpointError(f"the pieces of {shown(name)} do not make up its shape {shown(shape)}")
        tensors[name] = derive(parts, shape, _joiner(shape), str(name))
    return tensors


def _joiner(shape: Index) -> Callable[..., np.ndarray]:
    return lambda *parts: np.concatenate([part.reshape(-1) for part in parts]).reshape(shape)
