"""An open corpus of any format: sequences of tokens in one flat array."""

from __future__ import annotations

import hashlib
from functools import cached_property

import numpy as np

_CHUNK = 1 << 22  # index entries handled at a time
_SAMPLED_BLOCKS, _BLOCK_BYTES = 16, 4096


def runs_from_zero(boundaries: np.ndarray, last: int) -> bool:
    """Whether ``boundaries`` begin with 0, end with ``last`` and never decrease. The check runs in chunks."""
    if not boundaries.shape[0] or boundaries[0] != 0 or boundaries[-1] != last:
        return False
    parts = (boundaries[first : first + _CHUNK + 1] for first in range(0, boundaries.shape[0], _CHUNK))
    return all((part[1:] >= part[:-1]).all() for part in parts)


class TokenStore:
    """Base class of all corpus formats: sequences of tokens that follow one another in a flat array.

    Attributes:
        prefix: the path without its suffix, as the user gave it; used in messages.
        sizes: int32 [N], the number of tokens of each sequence.
        byte_offsets: int64 [N], the start of each sequence in the flat token array, in bytes.
        document_indices: int64 [documents + 1], document boundaries counted in sequences.
        dtype: dtype of the stored tokens.
    """

    def __init__(
        self,
        prefix: str,
        tokens: np.ndarray,
        sizes: np.ndarray,
        byte_offsets: np.ndarray,
        document_indices: np.ndarray,
    ) -> None:
        self.prefix = prefix
        self.sizes = sizes
        self.byte_offsets = byte_offsets
        self.document_indices = document_indices
        self.dtype = tokens.dtype
        self._tokens = tokens

    def __len__(self) -> int:
        return self.sizes.shape[0]

    @property
    def num_tokens(self) -> int:
        return self._tokens.shape[0]

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Tokens ``[offset, offset + length)`` of one sequence, as a read-only view. Raises IndexError."""
        if not 0 <= index < len(self):
            raise IndexError(f"{self.prefix}: sequence {index} of {len(self)}")
        size = int(self.sizes[index])
        length = size - offset if length is None else length
        if offset < 0 or length < 0 or offset + length > size:
            raise IndexError(
                f"{self.prefix}: tokens [{offset}, {offset + length}) of sequence {index}, which has {size}"
            )
        start = int(self.byte_offsets[index]) // self.dtype.itemsize + offset
        return self._tokens[start : start + length]

    def flat(self, first: int, last: int) -> np.ndarray:
        """Tokens ``[first, last)`` of the whole corpus, across sequences; a view."""
        return self._tokens[first:last]

    @cached_property
    def fingerprint(self) -> str:
        """A hash that distinguishes corpora without reading them: lengths, boundaries, size, and a few
        blocks, which differ for fixed-length chunks under two tokenizers. A single changed token elsewhere
        goes unnoticed. The path does not count, so a corpus can be moved."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update(f"{self.dtype.str} {len(self)} {self.num_tokens}".encode())
        for values in (self.sizes, self.document_indices):
            for first in range(0, values.shape[0], _CHUNK):
                digest.update(np.ascontiguousarray(values[first : first + _CHUNK]))
        block = _BLOCK_BYTES // self.dtype.itemsize
        last = max(0, self.num_tokens - block)
        for first in sorted({last * i // (_SAMPLED_BLOCKS - 1) for i in range(_SAMPLED_BLOCKS)}):
            digest.update(np.ascontiguousarray(self._tokens[first : first + block]))
        return digest.hexdigest()
