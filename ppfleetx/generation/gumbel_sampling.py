"""Sample tokens reproducibly: the random numbers of a row, and the token they select.

Each token gets an arrival time E / p, with E drawn from Exp(1) and p its probability, and the token with the
smallest time is selected. This selects each token with its probability; in logarithms it is the Gumbel-max
trick. Unlike with a search in cumulative sums, a change in the last bits of the probabilities changes the
result only if two times are almost equal. The frequency of this does not depend on the size of the
vocabulary; ``docs/generation.md`` gives it.

There are two rounds, so that a few hundred random numbers suffice for any vocabulary: first blocks of `BLOCK`
consecutive ids compete, then the tokens of the winning block. Sums are computed in float64, so all devices
get the same result.

Shape letters: b rows, V vocabulary, n random numbers per draw.
"""

from __future__ import annotations

import numpy as np
import paddle

BLOCK = 128
"""The number of tokens in a block."""
_WORDS_PER_COUNTER = 4  # 64-bit words that Philox makes of each value of its counter
_NUMBERS_PER_COUNTER = 2 * _WORDS_PER_COUNTER


def race_size(vocab_size: int) -> int:
    """The number of random numbers per draw, n: one for each place in a block, and one for each block."""
    return BLOCK + -(-vocab_size // BLOCK)


class RandomStream:
    """The random numbers of one row, a function of seed and numbers of prompt, continuation and step.

    They are computed on the host from the output of Philox 4x64-10, which NumPy guarantees to be stable, so
    they depend neither on the device, nor on other rows, nor on NumPy's version.
    """

    def __init__(self, seed: int, prompt: int, copy: int, vocab_size: int) -> None:
        self._key, self._size = _key(seed, prompt, copy), race_size(vocab_size)
        self._philox, self._step = np.random.Philox(key=self._key), 0

    def numbers(self, step: int, num_steps: int = 1) -> np.ndarray:
        """``[num_steps, n]`` float32 numbers from Exp(1), all above 0, for the steps from ``step`` on."""
        counters = -(-self._size // _NUMBERS_PER_COUNTER)  # of a step
        if step != self._step:
            self._philox = np.random.Philox(key=self._key, counter=step * counters)
        self._step = step + num_steps
        words = self._philox.random_raw(num_steps * counters * _WORDS_PER_COUNTER)
        halves = words.astype("<u8", copy=False).view("<u4").reshape(num_steps, -1)[:, : self._size]
        return -np.log((halves + 0.5) * 2.0**-32).astype(np.float32)


def uniforms(seed: int, prompt: int, copy: int, count: int) -> np.ndarray:
    """The float32 random numbers in [0, 1) of one row, for programs exported in format 2."""
    return np.random.Generator(np.random.Philox(key=_key(seed, prompt, copy))).random(count, np.float32)


def _key(seed: int, prompt: int, copy: int) -> np.ndarray:
    return np.array([seed % 2**64, (prompt << 32) | copy], dtype=np.uint64)


def draw(weights: paddle.Tensor, exponentials: paddle.Tensor) -> paddle.Tensor:
    """Draw one token per row, ``[b]`` int64, by ``exponentials [b, n]`` float32 of the rows' `RandomStream`.

    ``weights [b, V]`` float32 are probabilities up to a factor per row; a token of weight 0 is never drawn.
    """
    if paddle.in_dynamic_mode() and weights.place.is_cpu_place():
        return paddle.to_tensor(_draw_on_host(weights.numpy(), exponentials.numpy()))
    return draw_by_operations(weights, exponentials)


def draw_by_operations(weights: paddle.Tensor, exponentials: paddle.Tensor) -> paddle.Tensor:
    """Like :func:`draw`, but works on any device and in an exported program."""
    vocab_size = weights.shape[-1]
    num_blocks = -(-vocab_size // BLOCK)
    missing = num_blocks * BLOCK - vocab_size
    if missing:
        weights = paddle.concat([weights, paddle.zeros([weights.shape[0], missing], weights.dtype)], axis=1)
    weights = weights.reshape([-1, num_blocks, BLOCK])
    exponentials = exponentials.astype("float64")
    block = (weights.astype("float64").sum(-1) / exponentials[:, BLOCK:]).argmax(-1)
    rows = paddle.arange(weights.shape[0]) * num_blocks + block
    inside = weights.reshape([-1, BLOCK]).index_select(rows).astype("float64")
    place = (inside / exponentials[:, :BLOCK]).argmax(-1)
    # NaN weights of a broken model could lead to an index beyond the vocabulary.
    return (block * BLOCK + place).clip(max=vocab_size - 1)


def _draw_on_host(weights: np.ndarray, exponentials: np.ndarray) -> np.ndarray:
    """Like :func:`draw`, with NumPy, which needs fewer steps."""
    rows, vocab_size = weights.shape
    missing = -vocab_size % BLOCK
    if missing:
        weights = np.concatenate([weights, np.zeros([rows, missing], weights.dtype)], axis=1)
    blocks = weights.reshape(rows, -1, BLOCK)
    block = (blocks.sum(-1, dtype=np.float64) / exponentials[:, BLOCK:]).argmax(-1)
    place = (blocks[np.arange(rows), block].astype(np.float64) / exponentials[:, :BLOCK]).argmax(-1)
    return np.minimum(block * BLOCK + place, vocab_size - 1)
