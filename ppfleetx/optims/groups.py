"""Which parameters weight decay applies to, decided by canonical name and global shape."""

from __future__ import annotations

from collections.abc import Sequence


def decays(name: str, global_shape: Sequence[int]) -> bool:
    """Whether weight decay applies to parameter `name`.

    Biases and one-dimensional parameters (norm gains) are not decayed; matrices are, word and
    position embeddings among them (Megatron's rule). The shape is the global one: a slice of a
    matrix never turns into a vector.
    """
    return not (name.endswith(".bias") or len(global_shape) <= 1)
