"""Safetensors files: tensors read one at a time, and written one at a time with Hugging Face's index."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ppfleetx.checkpoint.lazy import LazyTensor, read_bytes
from ppfleetx.checkpoint.slices import NUMPY_OF_DTYPE
from ppfleetx.config.errors import CheckpointError
from ppfleetx.utils.files import atomic_write

_MAX_HEADER = 100_000_000  # the library's own limit
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def read_safetensors(path: str | Path) -> dict[str, LazyTensor]:
    """The tensors of a file by name. Raises CheckpointError when it is damaged or no such file."""
    path = Path(path)
    size = path.stat().st_size if path.is_file() else 0
    if size < 8:
        raise CheckpointError(f"{path} is not a safetensors file")
    length = int.from_bytes(read_bytes(path, 0, 8).tobytes(), "little")
    if length > min(size - 8, _MAX_HEADER):
        raise CheckpointError(f"{path} is not a safetensors file, or is damaged")
    try:
        table = json.loads(read_bytes(path, 8, length).tobytes())
        table.pop("__metadata__", None)
        return {name: _tensor(path, entry, 8 + length, size) for name, entry in table.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} has a damaged header: {error}") from error


def write_sharded(
    directory: Path, tensors: Mapping[str, LazyTensor], *, max_bytes: int, metadata: Mapping[str, str]
) -> None:
    """Write tensors into one file, or several and their index; one tensor is held at a time."""
    groups: list[dict[str, LazyTensor]] = [{}]
    room = max_bytes
    for name, tensor in tensors.items():
        if tensor.num_bytes > room and groups[-1]:
            groups.append({})
            room = max_bytes
        groups[-1][name] = tensor
        room -= tensor.num_bytes
    if len(groups) == 1:
        _write(directory / SINGLE, groups[0], metadata)
        return
    where = {}
    for number, group in enumerate(groups, start=1):
        name = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        _write(directory / name, group, metadata)
        where |= dict.fromkeys(group, name)
    total = sum(tensor.num_bytes for tensor in tensors.values())
    with atomic_write(directory / INDEX, "w") as file:
        json.dump({"metadata": {"total_size": total}, "weight_map": where}, file, indent=1)


def _tensor(path: Path, entry: Mapping[str, Any], data_start: int, size: int) -> LazyTensor:
    dtype, shape = entry["dtype"], tuple(entry["shape"])
    start, end = entry["data_offsets"]
    if dtype not in NUMPY_OF_DTYPE:
        raise ValueError(f"element type {dtype}")
    held = NUMPY_OF_DTYPE[dtype]
    if not all(type(n) is int and n >= 0 for n in (*shape, start, end)):
        raise ValueError("an impossible shape or position")
    if end - start != prod(shape) * held.itemsize or data_start + end > size:
        raise ValueError("a tensor that is not where the header says; the file may be cut off")

    def load() -> np.ndarray:
        return read_bytes(path, data_start + start, end - start).view(held).reshape(shape)

    return LazyTensor(dtype, shape, load)


def _write(path: Path, tensors: Mapping[str, LazyTensor], metadata: Mapping[str, str]) -> None:
    table: dict[str, Any] = {"__metadata__": dict(metadata)}
    # Wide elements first: then every tensor is aligned for readers that map the file.
    order = sorted(tensors, key=lambda name: -NUMPY_OF_DTYPE[tensors[name].dtype].itemsize)
    position = 0
    for name in order:
        end = position + tensors[name].num_bytes
        shape = list(tensors[name].shape)
        table[name] = {"dtype": tensors[name].dtype, "shape": shape, "data_offsets": [position, end]}
        position = end
    header = json.dumps(table, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with atomic_write(path) as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for name in order:
            values = np.ascontiguousarray(tensors[name].read(), NUMPY_OF_DTYPE[tensors[name].dtype])
            file.write(values.reshape(-1).view(np.uint8).data)
