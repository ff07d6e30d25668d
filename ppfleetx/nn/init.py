"""Initial weights as a function of seed, canonical name and global index: bitwise equal under every parallel
plan."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Rows and columns of a tile. Changing them changes all initial weights.
_TILE = (128, 512)
# Number of Philox counter values reserved for each tile, far more than its normal draws need.
_COUNTERS_PER_TILE = 1 << 32


@dataclass(frozen=True)
class Constant:
    """Initial values of a parameter: every element has the same ``value``."""

    value: float = 0.0


@dataclass(frozen=True)
class Normal:
    """Initial values of a parameter: normally distributed with mean 0 and standard deviation ``std``. Along
    ``padded_dim``, elements from index ``true_size`` on are zero, because they are vocabulary padding."""

    std: float
    padded_dim: int | None = None
    true_size: int | None = None


Init = Constant | Normal


def draw(
    init: Init,
    seed: int,
    name: str,
    global_shape: Sequence[int],
    offset: Sequence[int] | None = None,
    local_shape: Sequence[int] | None = None,
) -> np.ndarray:
    """Draw the initial values (float32) of a parameter, or of its slice with ``local_shape`` at ``offset``.
    Different names give independent values. With :class:`Normal`, the parameter must have one to three
    dimensions."""
    offset = tuple(offset) if offset is not None else (0,) * len(global_shape)
    local_shape = tuple(local_shape) if local_shape is not None else tuple(global_shape)
    if isinstance(init, Constant):
        return np.full(local_shape, init.value, dtype=np.float32)
    if len(global_shape) == 3:
        matrices = range(offset[0], offset[0] + local_shape[0])
        rest = global_shape[1:], offset[1:], local_shape[1:]
        return np.stack([draw(init, seed, f"{name}.{number}", *rest) for number in matrices])
    assert len(global_shape) in (1, 2), f"{name}: normal initialization is of vectors and matrices"
    rows_cols = (1, *global_shape)[-2:]
    values = _normal_tiles(_key(seed, name), rows_cols, (0, *offset)[-2:], (1, *local_shape)[-2:])
    values *= np.float32(init.std)
    values = values.reshape(local_shape)
    if init.padded_dim is not None:
        first_padding = max(0, init.true_size - offset[init.padded_dim])
        np.moveaxis(values, init.padded_dim, 0)[first_padding:] = 0.0
    return values


def _key(seed: int, name: str) -> np.ndarray:
    digest = hashlib.sha256(f"{seed}\0{name}".encode()).digest()
    return np.frombuffer(digest[:16], dtype="<u8").astype(np.uint64)


def _normal_tiles(
    key: np.ndarray, shape: Sequence[int], offset: Sequence[int], local_shape: Sequence[int]
) -> np.ndarray:
    """Return a slice of a matrix of standard normal float32 values. The slice begins at ``offset`` and has
    the shape ``local_shape``."""
    # Each tile is drawn from its own counter range of a Philox stream, so a rank draws only the tiles that
    # overlap its slice.
    out = np.empty(local_shape, dtype=np.float32)
    tiles_per_row = -(-shape[1] // _TILE[1])
    touched = [
        range(start // tile, -(-(start + size) // tile))
        for start, size, tile in zip(offset, local_shape, _TILE, strict=True)
    ]
    for tile_row, tile_col in itertools.product(*touched):
        counter = (tile_row * tiles_per_row + tile_col) * _COUNTERS_PER_TILE
        tile = np.random.Generator(np.random.Philox(key=key, counter=counter)).standard_normal(
            _TILE, dtype=np.float32
        )
        source, target = [], []
        for position, start, size, extent in zip(
            (tile_row, tile_col), offset, local_shape, _TILE, strict=True
        ):
            origin = position * extent
            low, high = max(start, origin), min(start + size, origin + extent)
            source.append(slice(low - origin, high - origin))
            target.append(slice(low - start, high - start))
        out[tuple(target)] = tile[tuple(source)]
    return out
