"""Random numbers for dropout that depend on the training step, not on earlier random draws.

The dropout masks of a layer are a function of (seed, step, micro batch, replica, layer number), so
checkpoints do not need generator states for dropout. There are two streams of random numbers. Dropout uses
the *default* stream for activations that every tensor-parallel rank holds in full. It uses the *sliced*
stream, whose numbers also depend on the tensor-parallel rank, for activations that are split between these
ranks.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from contextlib import AbstractContextManager
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np

from ppfleetx.distributed.device import generator

if TYPE_CHECKING:
    from paddle import nn

    from ppfleetx.distributed.context import ParallelContext


def derive_seed(*parts: int | str) -> int:
    """Return a 63-bit seed derived from ``parts`` with SHA-256."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(sha256(text.encode()).digest()[:8], "little") >> 1


def seed_everything(seed: int) -> None:
    """Seed the default generators of Python, NumPy and Paddle, for random numbers outside training steps."""
    import paddle

    random.seed(seed)
    np.random.seed(derive_seed("numpy", seed) % 2**32)
    paddle.seed(derive_seed("paddle", seed))


def register_sliced_stream(seed: int) -> None:
    """Create the random generator of :func:`sliced_stream`. Fleet's tensor-parallel layers also use this
    generator."""
    tracker = stream_tracker()
    tracker.reset()
    tracker.add(_sliced_name(), derive_seed("sliced", seed))


def sliced_stream() -> AbstractContextManager[None]:
    """Context manager in which Paddle draws from the *sliced* stream of random numbers. In a forward pass
    that :class:`DropoutStreams` has seeded, each tensor-parallel rank draws different numbers."""
    return stream_tracker().rng_state(_sliced_name())


class DropoutStreams:
    """Seeds the random generators for dropout whenever a layer starts a forward pass in training. The seeds
    differ between data-parallel replicas and between context-parallel (``sep``) ranks. The seeds of the
    *sliced* stream also differ between tensor-parallel ranks."""

    def __init__(self, seed: int, ctx: ParallelContext) -> None:
        self._seed, self._step, self._replica = seed, 0, (ctx.data_rank, ctx.rank_on("sep"))
        self._mp_rank = ctx.rank_on("mp") if ctx.size_of("mp") > 1 else None
        self._passes: dict[int, int] = {}

    def begin_step(self, step: int) -> None:
        """Set the number of the optimizer step (from 1) for the seeds of the following forward passes, and
        count micro batches from 0 again."""
        self._step, self._passes = step, {}

    def attach(self, indexed_layers: Iterable[tuple[int, nn.Layer]]) -> None:
        """Add a hook to each layer with dropout. The hook seeds the random generators at the start of the
        layer's forward pass. ``indexed_layers`` are pairs (index in the whole model, layer) of this rank."""
        from paddle.nn import Dropout

        for index, layer in indexed_layers:
            if any(isinstance(part, Dropout) and part.p > 0 for part in layer.sublayers()):
                layer.register_forward_pre_hook(lambda layer, _, index=index: self._enter(layer, index))

    def _enter(self, layer: nn.Layer, index: int) -> None:
        if not layer.training:
            return
        micro_batch = self._passes.get(index, 0)
        self._passes[index] = micro_batch + 1
        place = (self._seed, self._step, micro_batch, *self._replica, index)
        if self._mp_rank is not None:
            with sliced_stream():
                generator().manual_seed(derive_seed("sliced dropout", *place, self._mp_rank))
        generator().manual_seed(derive_seed("dropout", *place))


def stream_tracker() -> Any:
    from paddle.distributed.fleet.meta_parallel import get_rng_state_tracker

    return get_rng_state_tracker()


def _sliced_name() -> str:
    from paddle.distributed.fleet.layers.mpu.random import MODEL_PARALLEL_RNG

    return MODEL_PARALLEL_RNG
