"""What a task tells the engine: its stages and its loss, and no training logic."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import paddle

from ppfleetx.config.sections import RunConfig
from ppfleetx.nn.stage import LayerFactory, Stage


class BasicModule(ABC):
    """A task on a model, independent of how it is parallelised."""

    def __init__(self, cfg: RunConfig) -> None:
        self.cfg = cfg

    @abstractmethod
    def stages(self, factory: LayerFactory) -> list[Stage]:
        """The model as named stages, first to last."""

    @abstractmethod
    def loss(
        self, model: Any, batch: dict[str, paddle.Tensor], token_loss: Callable[..., Any]
    ) -> tuple[paddle.Tensor, paddle.Tensor]:
        """(sum of the loss over valid tokens, their number) of one micro batch.

        Args:
            model: callable, ``model(tokens, position_ids=..., document_start=...) -> logits``.
            batch: tensors of the micro batch.
            token_loss: :meth:`ppfleetx.nn.stage.LayerFactory.token_loss` for logits as the plan leaves them.
        """
