"""Tensors in Paddle's pickled files (``.pdparams``, ``.pdopt``), without running what they hold."""

from __future__ import annotations

import operator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ppfleetx.checkpoint.lazy import LazyTensor, derive
from ppfleetx.config.errors import CheckpointError, shown
from ppfleetx.conversion.pickles import (
    PADDLE_NAMES,
    PickledArray,
    WeightsUnpickler,
    reading,
    tensor_of,
)
from ppfleetx.utils.foreign_files import opened

_NAME_TABLE = "StructuredToParameterName@@"
_CHUNKED = "UnpackBigParamInfor@@"  # sic: Paddle's own spelling


def read_paddle_file(path: str | Path) -> dict[str, LazyTensor]:
    """The tensors of a state dict that Paddle saved, by name; anything else in it is left out.

    16-bit integers without sign are what Paddle makes of bfloat16, and are taken for that.

    Raises:
        RefusedPickleError: the file wants to run something; nothing has been run.
        CheckpointError: it cannot be read or is not such a file.
    """
    path = Path(path)
    with opened(path) as file, reading(path):
        tree = WeightsUnpickler(file, PADDLE_NAMES).load()
        if not isinstance(tree, dict):
            raise CheckpointError("not a state dict")
        tensors = {}
        for name, value in tree.items():
            tensor = _tensor(value)
            if tensor is not None:
                if not isinstance(name, str):
                    raise CheckpointError(f"a tensor has the name {shown(name)}, which is no text")
                tensors[name] = tensor
        return _joined(tensors, tree.get(_CHUNKED))


def _tensor(value: Any) -> LazyTensor | None:
    """The tensor in an array, or in the pair (parameter name, array) that a Tensor is saved as."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str):
        value = value[1]
    return tensor_of(value.array, bfloat16_as_uint16=True) if isinstance(value, PickledArray) else None


def _joined(tensors: dict[str, LazyTensor], chunked: Any) -> dict[str, LazyTensor]:
    """Put together the tensors that old pickle protocols forced Paddle to write in pieces."""
    tensors.pop(_NAME_TABLE, None)
    if chunked is None:
        return tensors
    if not isinstance(chunked, dict):
        raise CheckpointError(f"its {_CHUNKED} is {shown(chunked)}")
    for name, form in chunked.items():
        try:
            shape = tuple(map(operator.index, form["OriginShape"]))
            parts = [tensors.pop(part) for part in form["slices"]]
        except (LookupError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{shown(name)} was saved in pieces, and not all of them are there"
            ) from error
        if min(shape, default=0) < 0 or sum(prod(part.shape) for part in parts) != prod(shape):
            raise CheckpointError(
                f"the pieces {shown(name)} was saved in do not make up its shape {shown(shape)}"
            )
        tensors[name] = derive(parts, shape, _joiner(shape), str(name))
    return tensors


def _joiner(shape: tuple[int, ...]) -> Any:
    return lambda *parts: np.concatenate([part.reshape(-1) for part in parts]).reshape(shape)
