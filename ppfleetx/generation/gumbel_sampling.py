"""Reproducible sampling with the Gumbel-max trick.

For each token with probability p, a number E is drawn from Exp(1). The token with the smallest E / p is
selected. A draw first selects a block of `BLOCK` consecutive ids, then a token in the block. A vocabulary
of 50,000 tokens thus needs about 500 random numbers per draw.

Shape letters: b rows, V vocabulary size, n random numbers per draw.
"""

from __future__ import annotations

import numpy as np
import paddle

BLOCK = 128
"""The number of tokens in a block."""
_WORDS_PER_COUNTER = 4  # 64-bit words that Philox produces per counter value
_NUMBERS_PER_COUNTER = 2 * _WORDS_PER_COUNTER


def race_size(vocab_size: int) -> int:
    """Return the number of random numbers needed to sample one token: one for each block of `BLOCK` token
    ids, and `BLOCK` more to choose within a block."""
    return BLOCK + -(-vocab_size // BLOCK)


class RandomStream:
    """The random numbers for sampling one sequence. They depend on the seed, the prompt's index
    (``prompt``), the index of the continuation (``copy``), the step and the vocabulary size. They do not
    depend on the device, on other sequences of the batch, or on NumPy's version."""

    def __init__(self, seed: int, prompt: int, copy: int, vocab_size: int) -> None:
        self._key = np.array([seed % 2**64, (prompt << 32) | copy], dtype=np.uint64)
        self._size = race_size(vocab_size)
        self._philox, self._step = np.random.Philox(key=self._key), 0

    def numbers(self, step: int, num_steps: int = 1) -> np.ndarray:
        """Return the random numbers for the ``num_steps`` steps that begin with ``step``, ``[num_steps, n]``
        float32, where n is the `race_size`. They are drawn from Exp(1), and are all above 0."""
        counters = -(-self._size // _NUMBERS_PER_COUNTER)  # counter values per step
        if step != self._step:
            self._philox = np.random.Philox(key=self._key, counter=step * counters)
        self._step = step + num_steps
        # Unlike the methods of Generator, raw Philox output does not change with NumPy's version.
        words = self._philox.random_raw(num_steps * counters * _WORDS_PER_COUNTER)
        halves = words.astype("<u8", copy=False).view("<u4").reshape(num_steps, -1)[:, : self._size]
        return -np.log((halves + 0.5) * 2.0**-32).astype(np.float32)

    def uniforms(self, count: int) -> np.ndarray:
        """Return ``count`` random numbers in [0, 1), float32. Only programs exported in the older format 2
        use them."""
        return np.random.Generator(np.random.Philox(key=self._key)).random(count, np.float32)


def draw(weights: paddle.Tensor, exponentials: paddle.Tensor) -> paddle.Tensor:
    """Sample one token per row with the Gumbel-max trick. ``weights [b, V]`` float32 are unnormalized
    probabilities. ``exponentials [b, n]`` float32 are this step's random numbers from each row's
    `RandomStream`; `race_size` gives n. Returns token ids ``[b]`` int64."""
    if paddle.in_dynamic_mode() and weights.place.is_cpu_place():
        return paddle.to_tensor(_draw_with_numpy(weights.numpy(), exponentials.numpy()))
    return draw_by_operations(weights, exponentials)


def draw_by_operations(weights: paddle.Tensor, exponentials: paddle.Tensor) -> paddle.Tensor:
    """Sample the same tokens as :func:`draw`, but with Paddle operations only, which run on any device and in
    exported programs. ``weights [b, V]`` are unnormalized probabilities, and ``exponentials [b, n]`` float32
    are each row's random numbers from Exp(1); `race_size` gives n. Returns token ids ``[b]`` int64."""
    vocab_size = weights.shape[-1]
    num_blocks = -(-vocab_size // BLOCK)
    missing = num_blocks * BLOCK - vocab_size
    if missing:
        weights = paddle.concat([weights, paddle.zeros([weights.shape[0], missing], weights.dtype)], axis=1)
    weights = weights.reshape([-1, num_blocks, BLOCK])
    # Sums in float64 give the same result on all devices.
    exponentials = exponentials.astype("float64")
    block = (weights.astype("float64").sum(-1) / exponentials[:, BLOCK:]).argmax(-1)
    rows = paddle.arange(weights.shape[0]) * num_blocks + block
    inside = weights.reshape([-1, BLOCK]).index_select(rows).astype("float64")
    place = (inside / exponentials[:, :BLOCK]).argmax(-1)
    # Keep the index inside the vocabulary even if a broken model produces NaN.
    return (block * BLOCK + place).clip(max=vocab_size - 1)


def _draw_with_numpy(weights: np.ndarray, exponentials: np.ndarray) -> np.ndarray:
    rows, vocab_size = weights.shape
    missing = -vocab_size % BLOCK
    if missing:
        weights = np.concatenate([weights, np.zeros([rows, missing], weights.dtype)], axis=1)
    blocks = weights.reshape(rows, -1, BLOCK)
    block = (blocks.sum(-1, dtype=np.float64) / exponentials[:, BLOCK:]).argmax(-1)
    place = (blocks[np.arange(rows), block].astype(np.float64) / exponentials[:, :BLOCK]).argmax(-1)
    return np.minimum(block * BLOCK + place, vocab_size - 1)
