"""The loss of a step, told apart by where its samples come from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import paddle

from ppfleetx.config.errors import ConfigError
from ppfleetx.data.loader import MicroBatch
from ppfleetx.distributed.context import DATA_AXES, ParallelContext
from ppfleetx.distributed.transfer import read

if TYPE_CHECKING:
    from ppfleetx.nn.stage import LayerFactory

# Ranks of these axes see different tokens (or, along pp, none), so their loss sums add up to the job's.
LOSS_AXES = ("dp", "sharding", "sep", "pp")


class SourceLosses:
    """Listens to the loss of each row of a micro batch, and adds rows up by their ``source_ids``.

    Args:
        factory: whose ``token_loss`` tells the losses of rows.

    Attributes:
        count: number of sources; 0: nothing is listened to.
    """

    def __init__(self, factory: LayerFactory) -> None:
        self.count = 0
        self._factory = factory
        self._heard: list[tuple[paddle.Tensor, paddle.Tensor]] = []

    def begin(self) -> None:
        """Forget the last step."""
        self._heard = []

    @contextmanager
    def listening(self, batch: Mapping[str, Any]) -> Iterator[None]:
        """Hear the losses that are computed within, of the rows of ``batch``."""
        if not self.count or "source_ids" not in batch:
            yield
            return
        self._factory.tell_rows = partial(self._hear, batch["source_ids"])
        try:
            yield
        finally:
            self._factory.tell_rows = None

    def _hear(self, source_ids: paddle.Tensor, row_losses: paddle.Tensor) -> None:
        self._heard.append((source_ids, row_losses))

    def totals(
        self, ctx: ParallelContext, micro_batches: Sequence[MicroBatch]
    ) -> dict[int, tuple[float, float]] | None:
        """{source: (loss sum, tokens that count)} of the step over the whole job, the same on all its ranks.

        Sources of which no token counts are left out. None where nothing is listened to.

        Raises:
            ConfigError: the task's loss is not computed by the factory's ``token_loss``.
        """
        if not self.count:
            return None
        losses, tokens = np.zeros(self.count), np.zeros(self.count)
        if self._heard:
            ids, rows = (read(paddle.concat(list(parts))) for parts in zip(*self._heard, strict=True))
            np.add.at(losses, ids, rows.astype(np.float64))
        for batch in micro_batches:
            np.add.at(tokens, batch["source_ids"], batch["loss_mask"].sum(axis=1, dtype=np.float64))
        heard = ctx.sum_over(LOSS_AXES, float(len(self._heard)), *losses.tolist())
        counted = ctx.sum_over(DATA_AXES, *tokens.tolist())
        if not heard[0]:
            raise ConfigError(
                "the task computes its loss without `factory.token_loss`, which tells the losses of rows",
                key="Engine.log_source_loss",
                value=True,
            )
        return {i: (heard[1 + i], n) for i, n in enumerate(counted) if n > 0}
