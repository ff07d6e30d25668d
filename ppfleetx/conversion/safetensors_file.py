"""Safetensors files: tensors read one at a time, and written one at a time with Hugging Face's index."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ppfleetx.checkpoint.lazy import LazyTensor, read_bytes
from ppfleetx.checkpoint.slices import NUMPY_OF_DTYPE, Index
from ppfleetx.config.errors import CheckpointError, shown
from ppfleetx.utils.files import atomic_write
from ppfleetx.utils.foreign_files import opened, parse_json

_MAX_HEADER = 100_000_000  # the library's own limit
_MAX_DIMS = 32  # NumPy's
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# What the metadata's `format` says where PaddleNLP and PaddleFormers wrote the file.
PADDLE_FORMATS = frozenset({"np", "paddle", "pd"})


def read_safetensors(path: str | Path) -> dict[str, LazyTensor]:
    """The tensors of a file by name.

    The rules are those of the ``safetensors`` library: the header is at most 100 MB, and the tensors cover
    the rest of the file without gaps, overlaps or bytes left over. Besides, no name may be there twice.

    Raises:
        CheckpointError: it is damaged or no such file.
    """
    path = Path(path)
    table, metadata, start, size = _header(path)
    if metadata.get("format") in PADDLE_FORMATS:
        table = {name: _bfloat16_of_paddle(entry) for name, entry in table.items()}
    places = {name: _place(path, name, entry) for name, entry in table.items()}
    _check_layout(path, places, size - start)
    return {name: _tensor(path, place, start) for name, place in places.items()}


def safetensors_format(path: str | Path) -> str | None:
    """What a file says of its format: `pt` of PyTorch, one of PADDLE_FORMATS, or another; None: nothing.

    Raises:
        CheckpointError: it is damaged or no such file.
    """
    _, metadata, _, _ = _header(Path(path))
    return metadata.get("format")


def _header(path: Path) -> tuple[dict[str, Any], dict[str, str], int, int]:
    """Entries of the tensors, metadata, where the data begin, and the size of the file."""
    with opened(path) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        length = _header_length(path, file.read(8), size)
        header = file.read(length)
    table = parse_json(header, f"the header of {path}")
    metadata = table.pop("__metadata__", None)
    _check_metadata(path, metadata)
    return table, metadata or {}, 8 + length, size


def _bfloat16_of_paddle(entry: Any) -> Any:
    """An entry with 16-bit integers without sign as what Paddle means by them."""
    return {**entry, "dtype": "BF16"} if isinstance(entry, dict) and entry.get("dtype") == "U16" else entry


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


def _header_length(path: Path, begin: bytes, size: int) -> int:
    """Length of the header, as the first bytes of a file of ``size`` bytes tell it."""
    if begin == b"version ":
        raise CheckpointError(f"{path} is the pointer that Git LFS leaves for a file; fetch the file itself")
    if len(begin) < 8:
        raise CheckpointError(f"{path} is not a safetensors file: it has {size} bytes")
    length = int.from_bytes(begin, "little")
    if length > _MAX_HEADER:
        raise CheckpointError(
            f"{path} is not a safetensors file, or damaged: its header would have {length} bytes, the "
            f"most are {_MAX_HEADER}"
        )
    if length > size - 8:
        raise CheckpointError(
            f"{path} is cut off, or not a safetensors file: its header should have {length} bytes, the whole "
            f"file has {size}"
        )
    return length


def _check_metadata(path: Path, metadata: Any) -> None:
    if metadata is not None and not (
        isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    ):
        raise CheckpointError(f"the header of {path} is damaged: __metadata__ must be texts by name")


@dataclass(frozen=True, slots=True)
class _Place:
    """Element type and shape of a tensor, and where it lies, counted from the end of the header."""

    dtype: str
    shape: Index
    start: int
    end: int


def _place(path: Path, name: str, entry: Any) -> _Place:
    """A tensor as the header describes it. Raises CheckpointError for what none can be."""

    def damaged(what: str) -> CheckpointError:
        return CheckpointError(f"the header of {path} is damaged: {shown(name)} {what}")

    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise damaged("lacks its dtype, shape or data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in NUMPY_OF_DTYPE:
        raise CheckpointError(
            f"{path}: {shown(name)} has the element type {shown(dtype)}; those that are read: "
            f"{', '.join(NUMPY_OF_DTYPE)}"
        )
    if not _are_sizes(shape) or len(shape) > _MAX_DIMS:
        raise damaged(f"has the shape {shown(shape)}")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise damaged(f"has the data_offsets {shown(offsets)}")
    start, end = offsets
    if end - start != prod(shape) * NUMPY_OF_DTYPE[dtype].itemsize:
        raise damaged(
            f"of shape {shown(shape)} and type {dtype} cannot lie in the {end - start} bytes of its "
            f"data_offsets {offsets}"
        )
    return _Place(dtype, tuple(shape), start, end)


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(n) is int and 0 <= n < 1 << 63 for n in values)


def _check_layout(path: Path, places: Mapping[str, _Place], data_bytes: int) -> None:
    """Raise CheckpointError unless the tensors cover the data without gap, overlap or bytes left over."""
    reached, before = 0, None
    for name, place in sorted(places.items(), key=lambda item: (item[1].start, item[1].end)):
        if place.start != reached:
            what = "overlaps with" if place.start < reached else "leaves a gap after"
            other = "the header" if before is None else shown(before)
            raise CheckpointError(f"the header of {path} is damaged: {shown(name)} {what} {other}")
        reached, before = place.end, name
    if reached > data_bytes:
        raise CheckpointError(f"{path} is cut off: {reached - data_bytes} bytes of its tensors are missing")
    if reached < data_bytes:
        raise CheckpointError(
            f"{path} is damaged: {data_bytes - reached} bytes at its end belong to no tensor"
        )


def _tensor(path: Path, place: _Place, data_start: int) -> LazyTensor:
    def load() -> np.ndarray:
        content = read_bytes(path, data_start + place.start, place.end - place.start)
        return content.view(NUMPY_OF_DTYPE[place.dtype]).reshape(place.shape)

    return LazyTensor(place.dtype, place.shape, load)


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
