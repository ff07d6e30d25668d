"""Read safetensors files lazily, and write tensors into one such file, or into several files with an index
in Hugging Face's format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from ppfleetx.checkpoint.lazy_tensors import LazyTensor, read_bytes
from ppfleetx.checkpoint.slices import NUMPY_OF_DTYPE
from ppfleetx.checkpoint.storage import write_safetensors
from ppfleetx.checkpoint.weights import slices_of
from ppfleetx.checkpoint.writer import split_into_files
from ppfleetx.config.errors import CheckpointError, shown
from ppfleetx.utils.input_files import first_bytes, parse_json
from ppfleetx.utils.output_files import atomic_write

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# The `format` in the metadata of files from PaddleNLP and PaddleFormers.
PADDLE_FORMATS = frozenset({"np", "paddle", "pd"})


def read_safetensors(path: str | Path) -> dict[str, LazyTensor]:
    """Read the tensors of a safetensors file lazily, by name. Raises CheckpointError if the file is damaged,
    or has an unsupported element type."""
    path = Path(path)
    table, metadata, start = _header(path)
    tensors = {}
    for name, entry in table.items():
        dtype = entry["dtype"]
        if dtype == "U16" and metadata.get("format") in PADDLE_FORMATS:
            dtype = "BF16"  # NumPy has no bfloat16, so Paddle writes the bits as uint16
        if dtype not in NUMPY_OF_DTYPE:
            raise CheckpointError(
                f"{path}: {shown(name)} has the element type {dtype}; those that are read: "
                f"{', '.join(NUMPY_OF_DTYPE)}"
            )
        tensors[name] = _tensor(path, dtype, entry["shape"], start, entry["data_offsets"])
    return tensors


def safetensors_format(path: str | Path) -> str | None:
    """Return the entry ``format`` in the metadata of a safetensors file, such as ``pt`` for PyTorch. None
    if there is no such entry."""
    return _header(Path(path))[1].get("format")


def _header(path: Path) -> tuple[dict[str, Any], dict[str, str], int]:
    """Read the header of a safetensors file. Returns the tensor entries, the metadata, and the offset of
    the data in bytes."""
    begin = first_bytes(path)
    try:
        with safe_open(path, "numpy"):
            pass
    except SafetensorError as error:
        raise CheckpointError(f"{path} is damaged, cut off, or not a safetensors file: {error}") from error
    length = int.from_bytes(begin, "little")
    table = parse_json(read_bytes(path, 8, length).tobytes(), f"the header of {path}")
    return table, table.pop("__metadata__", None) or {}, 8 + length


def _tensor(path: Path, dtype: str, shape: list[int], start: int, offsets: list[int]) -> LazyTensor:
    def load() -> np.ndarray:
        content = read_bytes(path, start + offsets[0], offsets[1] - offsets[0])
        return content.view(NUMPY_OF_DTYPE[dtype]).reshape(shape)

    return LazyTensor(dtype, tuple(shape), load)


def write_sharded(
    directory: Path, tensors: Mapping[str, LazyTensor], *, max_bytes: int, metadata: Mapping[str, str]
) -> None:
    """Write tensors into safetensors files in ``directory``, one tensor at a time. If the tensors have more
    than ``max_bytes`` in total, they are split into several files with an index. A tensor larger than
    ``max_bytes`` gets a file of its own."""
    where = {}
    for name, pieces in split_into_files(list(slices_of(tensors)), max_bytes):
        write_safetensors(directory / name, name, pieces, metadata)
        where |= dict.fromkeys((piece.name for piece in pieces), name)
    if set(where.values()) == {SINGLE}:
        return
    total = sum(tensor.num_bytes for tensor in tensors.values())
    with atomic_write(directory / INDEX, "w") as file:
        json.dump({"metadata": {"total_size": total}, "weight_map": where}, file, indent=1)
