"""Tensors in Paddle's pickled files (``.pdparams``, ``.pdopt``), without running what they hold."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ppfleetx.checkpoint.lazy import LazyTensor, derive
from ppfleetx.checkpoint.pickled import PADDLE_NAMES, PickledArray
from ppfleetx.checkpoint.torch_file import refusal
from ppfleetx.checkpoint.unpickle import RefusedPickleError, Unpickler
from ppfleetx.config.errors import CheckpointError

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
    try:
        with path.open("rb") as file:
            tree = Unpickler(file, PADDLE_NAMES, path=path).load()
        if not isinstance(tree, dict):
            raise CheckpointError("not a state dict")
        tensors = {name: tensor for name, value in tree.items() if (tensor := _tensor(value)) is not None}
        return _joined(tensors, tree.get(_CHUNKED))
    except RefusedPickleError as error:
        raise refusal(path, error) from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _tensor(value: Any) -> LazyTensor | None:
    """The tensor in an array, or in the pair (parameter name, array) that a Tensor is saved as."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str):
        value = value[1]
    return value.lazy(bfloat16_as_uint16=True) if isinstance(value, PickledArray) else None


def _joined(tensors: dict[str, LazyTensor], chunked: Any) -> dict[str, LazyTensor]:
    """Put together the tensors that old pickle protocols forced Paddle to write in pieces."""
    tensors.pop(_NAME_TABLE, None)
    for name, form in (chunked or {}).items():
        try:
            shape = tuple(int(n) for n in form["OriginShape"])
            parts = [tensors.pop(part) for part in form["slices"]]
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{name} was saved in pieces, and not all of them are there") from error
        if sum(prod(part.shape) for part in parts) != prod(shape):
            raise CheckpointError(f"the pieces {name} was saved in do not make up its shape {list(shape)}")
        tensors[name] = derive(parts, shape, _joiner(shape), name)
    return tensors


def _joiner(shape: tuple[int, ...]) -> Any:
    return lambda *parts: np.concatenate([part.reshape(-1) for part in parts]).reshape(shape)
