"""Join the matrices of a fused parameter (q, k and v; gate and up), and the slices of tensor-parallel
ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from ppfleetx.checkpoint.lazy_tensors import LazyTensor, derive
from ppfleetx.checkpoint.reshard import cut_dim
from ppfleetx.config.errors import CheckpointError
from ppfleetx.nn.param_spec import Part


def join_parts(parts: Sequence[Part], *arrays: np.ndarray) -> np.ndarray:
    """Interleave matrices, such as q, k and v, along the last axis into one fused parameter.

    The columns of the result repeat in periods. Each period has some columns of the first matrix, then of the
    second, and so on. ``Part.width`` is the number of columns of one matrix in each period.

    Args:
        parts: one description for each of ``arrays``, in the same order.
    """
    lead = arrays[0].shape[:-1]
    pieces = [array.reshape(*lead, -1, part.width) for part, array in zip(parts, arrays, strict=True)]
    return np.concatenate(pieces, axis=-1).reshape(*lead, -1)


def split_parts(parts: Sequence[Part], fused: np.ndarray) -> tuple[np.ndarray, ...]:
    """Split a fused parameter into its matrices, such as q, k and v: the inverse of :func:`join_parts`."""
    lead = fused.shape[:-1]
    periods = fused.reshape(*lead, -1, parts[0].period)
    return tuple(periods[..., p.offset : p.offset + p.width].reshape(*lead, -1) for p in parts)


RankFiles = Mapping[tuple[int, int], Path]
"""(tensor-parallel rank, pipeline rank) -> the file of this rank."""


def check_complete(files: RankFiles, directory: Path) -> None:
    """Raise CheckpointError unless each combination of tensor-parallel and pipeline rank has a file."""
    mp_degree, pp_degree = (max(numbers) + 1 for numbers in zip(*files, strict=True))
    for mp in range(mp_degree):
        for pp in range(pp_degree):
            if (mp, pp) not in files or not files[mp, pp].is_file():
                raise CheckpointError(f"{directory} lacks tensor rank {mp}, pipeline rank {pp}")


def ranks_of_stage(files: RankFiles, pp: int) -> list[Path]:
    """Return the files of pipeline stage ``pp``, in the order of their tensor-parallel ranks."""
    return [files[rank] for rank in sorted(files) if rank[1] == pp]


def joined(ranks: Sequence[Mapping[str, LazyTensor]], directory: Path) -> dict[str, LazyTensor]:
    """Join the slices of each parameter from all tensor-parallel ranks.

    Args:
        ranks: the tensors of each tensor-parallel rank, in rank order.
        directory: the checkpoint, for messages.

    Raises CheckpointError if a rank lacks a parameter, or if slices do not fit together.
    """
    whole = {}
    for name, first in ranks[0].items():
        if any(name not in rank for rank in ranks):
            raise CheckpointError(f"{directory}: {name} is not on every tensor-parallel rank")
        parts, dim = [rank[name] for rank in ranks], cut_dim(name)
        if len(parts) == 1 or dim is None:
            whole[name] = first
            continue
        if any(part.shape != first.shape for part in parts) or len(first.shape) <= dim:
            shapes = ", ".join(str(list(part.shape)) for part in parts)
            raise CheckpointError(
                f"{directory}: {name} has the shapes {shapes} on the tensor-parallel ranks, which cannot be "
                "joined"
            )
        shape = tuple(n * len(parts) if axis == dim else n for axis, n in enumerate(first.shape))
        whole[name] = derive(parts, shape, lambda *arrays, dim=dim: np.concatenate(arrays, axis=dim), name)
    return whole
