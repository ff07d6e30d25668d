"""A progress bar over the tensors that are written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np

from ppfleetx.checkpoint.lazy import LazyTensor
from ppfleetx.utils.progress import ProgressBar


@contextmanager
def shown_reading(tensors: Mapping[str, LazyTensor], description: str) -> Iterator[dict[str, LazyTensor]]:
    """The same tensors; a bar counts their bytes as each of them is read."""
    total = sum(tensor.num_bytes for tensor in tensors.values())
    with ProgressBar(description, total=total / 1e6, unit="MB") as bar:
        yield {name: _counted(tensor, bar) for name, tensor in tensors.items()}


def _counted(tensor: LazyTensor, bar: ProgressBar) -> LazyTensor:
    def load() -> np.ndarray:
        values = tensor.load()
        bar.advance(tensor.num_bytes / 1e6)
        return values

    return LazyTensor(tensor.dtype, tensor.shape, load)
