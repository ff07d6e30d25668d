"""The contract of a task: its stages, its outputs and its loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import paddle

from ppfleetx.config.sections.root import RunConfig
from ppfleetx.nn.stage import LayerFactory, Stage

Tensors = dict[str, paddle.Tensor]
"""A micro batch on the device, by name."""


class BasicModule(ABC):
    """A task on a model, independent of how it is parallelised.

    A pipeline runs the stages itself and calls :meth:`loss` where they end; one process calls
    :meth:`forward` and then :meth:`loss`. Neither may keep anything from one call to the next.

    Args:
        cfg: the run's configuration.
    """

    loss_in_pieces = False
    """Whether :meth:`loss` only hands ``outputs`` on to the factory's ``token_loss`` or ``token_scores``, as
    ``Model.loss_chunks`` needs: they may then be a :class:`~ppfleetx.nn.chunked_loss.LogitsInPieces`."""

    def __init__(self, cfg: RunConfig) -> None:
        self.cfg = cfg

    @abstractmethod
    def stages(self, factory: LayerFactory) -> list[Stage]:
        """The model as named stages, first to last, made by ``factory``."""

    def forward(self, model: Any, batch: Tensors) -> paddle.Tensor:
        """What the last stage gives for a micro batch, ``[s, b, V]`` for a language model.

        Args:
            model: callable, ``model(tokens, position_ids=..., document_start=...)``.
            batch: ``tokens [b, s]``, and ``position_ids``, ``document_start`` where the data has them.
        """
        return model(
            batch["tokens"],
            position_ids=batch.get("position_ids"),
            document_start=batch.get("document_start"),
        )

    @abstractmethod
    def loss(
        self, outputs: paddle.Tensor, batch: Tensors, factory: LayerFactory
    ) -> tuple[paddle.Tensor, paddle.Tensor]:
        """(sum of the loss over what counts, how much counts) of one micro batch, both scalars.

        Args:
            outputs: what :meth:`forward` gave: as the plan leaves it, its columns perhaps sliced.
            batch: tensors of the micro batch.
            factory: the plan's; its ``token_loss`` and ``token_scores`` know how logits are sliced.
        """
