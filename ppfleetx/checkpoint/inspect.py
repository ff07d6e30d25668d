"""Summarize the contents of checkpoints, and compare two checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from math import prod
from re import Pattern
from typing import Any

import numpy as np

from ppfleetx.checkpoint.lazy_tensors import NAME_OF_DTYPE, cast
from ppfleetx.checkpoint.manifest import TensorEntry
from ppfleetx.checkpoint.reader import Checkpoint
from ppfleetx.checkpoint.slices import MODEL
from ppfleetx.config.message_text import bytes_text


@dataclass(frozen=True)
class Difference:
    """A tensor that differs between two checkpoints.

    Attributes:
        key: (``model`` or ``optimizer``, parameter name, optimizer state name). The state name is empty for
            model parameters.
        what: a description of the difference.
        largest: the largest absolute difference between corresponding elements; None unless both are
            floating-point tensors of the same shape.
    """

    key: tuple[str, str, str]
    what: str
    largest: float | None = None


def tensors_of(checkpoint: Checkpoint, pattern: Pattern[str] | None = None) -> list[TensorEntry]:
    entries = checkpoint.manifest.tensors.values()
    return [entry for entry in entries if pattern is None or pattern.search(label(entry))]


def label(entry: TensorEntry) -> str:
    return f"{entry.name}/{entry.state}" if entry.state else entry.name


def summary(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the main figures of a checkpoint, such as step, plan and sizes, as a dictionary of JSON values.
    ``parameters`` is the total number of elements of all parameters. Keys that end in ``_bytes`` are in
    bytes."""
    manifest = checkpoint.manifest
    of_model = [entry for entry in manifest.tensors.values() if entry.kind == MODEL]
    of_optimizer = [entry for entry in manifest.tensors.values() if entry.kind != MODEL]
    progress = manifest.state.get("train") or manifest.state.get("progress") or {}
    return {
        "path": str(checkpoint.path),
        "step": manifest.step,
        "epoch": manifest.epoch,
        "consumed_samples": progress.get("consumed_samples"),
        "saved_at": _time(checkpoint.saved_at_ns),
        "plan": dict(manifest.plan),
        "rank_directories": len({rank.get("directory") for rank in manifest.ranks} - {None}),
        "files": len(manifest.files),
        "parameters": sum(prod(entry.shape) for entry in of_model),
        "model_bytes": sum(entry.num_bytes for entry in of_model),
        "optimizer_bytes": sum(entry.num_bytes for entry in of_optimizer),
        "dtypes": sorted({entry.dtype for entry in of_model}),
        "optimizer_states": sorted({entry.state for entry in of_optimizer}),
        "vocab_size": manifest.vocab_size,
        "schedule": manifest.state.get("schedule"),
        "scaler": manifest.state.get("scaler"),
        "fingerprints": dict(manifest.fingerprints),
        "documents": sorted(manifest.documents),
        "source": (manifest.state.get("source") or {}).get("format"),
    }


def _time(nanoseconds: int) -> str | None:
    if not nanoseconds:
        return None
    return datetime.fromtimestamp(nanoseconds / 1e9, UTC).isoformat(timespec="seconds")


def summary_text(facts: Mapping[str, Any]) -> str:
    lines = []
    for key, value in facts.items():
        if value is None or value == {} or value == []:
            continue
        if key.endswith("_bytes"):
            value = bytes_text(value)
        elif isinstance(value, Mapping):
            value = ", ".join(f"{name} {part}" for name, part in value.items() if part is not None)
        elif isinstance(value, list):
            value = " ".join(map(str, value))
        elif key == "parameters":
            value = f"{value:,}"
        lines.append(f"{key.removesuffix('_bytes').replace('_', ' '):18} {value}")
    return "\n".join(lines)


def table(entries: list[TensorEntry]) -> str:
    """Return a text table with one tensor per line: name, shape, type, size, number of slices and files."""
    rows = [("tensor", "shape", "dtype", "size", "slices", "files")]
    for entry in entries:
        files = {piece.file for piece in entry.slices}
        shape = "x".join(map(str, entry.shape)) or "scalar"
        size = bytes_text(entry.num_bytes)
        rows.append((label(entry), shape, entry.dtype, size, str(len(entry.slices)), str(len(files))))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def differences(
    one: Checkpoint, other: Checkpoint, pattern: Pattern[str] | None = None
) -> Iterator[Difference]:
    """Compare two checkpoints bit by bit, without vocabulary padding, and yield the tensors that differ. With
    ``pattern``, only tensors whose :func:`label` it matches are compared."""
    mine = {entry.key: entry for entry in tensors_of(one, pattern)}
    theirs = {entry.key: entry for entry in tensors_of(other, pattern)}
    for key in mine.keys() - theirs.keys():
        yield Difference(key, f"only in {one.path}")
    for key in theirs.keys() - mine.keys():
        yield Difference(key, f"only in {other.path}")
    for key, entry in mine.items():
        if key in theirs:
            difference = _difference(one, entry, other, theirs[key])
            if difference is not None:
                yield difference


def _difference(
    one: Checkpoint, mine: TensorEntry, other: Checkpoint, theirs: TensorEntry
) -> Difference | None:
    shape, other_shape = _true_shape(one, mine), _true_shape(other, theirs)
    if shape != other_shape:
        return Difference(mine.key, f"shape {list(shape)} and {list(other_shape)}")
    a, b = (
        source.read(entry.name, entry.kind, entry.state, offset=(0,) * len(shape), shape=shape)
        for source, entry in ((one, mine), (other, theirs))
    )
    if mine.dtype == theirs.dtype and a.tobytes() == b.tobytes():
        return None
    if not {mine.dtype, theirs.dtype} <= NAME_OF_DTYPE.keys():
        return Difference(mine.key, "other values")
    wide = [cast(values, entry.dtype, "F64") for values, entry in ((a, mine), (b, theirs))]
    largest = float(np.abs(wide[0] - wide[1]).max(initial=0.0))
    types = "" if mine.dtype == theirs.dtype else f"{mine.dtype} and {theirs.dtype}, "
    return Difference(mine.key, f"{types}largest difference {largest:.6g}", largest)


def _true_shape(checkpoint: Checkpoint, entry: TensorEntry) -> tuple[int, ...]:
    vocab = checkpoint.manifest.vocab_size
    if entry.vocab_dim is None or vocab is None:
        return entry.shape
    return tuple(min(n, vocab) if dim == entry.vocab_dim else n for dim, n in enumerate(entry.shape))
