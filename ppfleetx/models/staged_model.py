"""A model whose stages are all in one process."""

from __future__ import annotations

from collections.abc import Sequence

import paddle
from paddle import nn

from ppfleetx.nn.attention import KeyValueCache
from ppfleetx.nn.stage import Stage, build_stage


class StagedModel(nn.Layer):
    """A model that runs its stages (embedding, blocks, final norm, head) in sequence.

    Args:
        seed: seed of the initial weights; None if the caller sets the weights later.
        empty: whether to create parameters without allocating memory.
    """

    def __init__(self, stages: Sequence[Stage], seed: int | None = 0, *, empty: bool = False) -> None:
        super().__init__()
        shared: dict[str, nn.Layer] = {}
        self.stages = nn.LayerList([build_stage(stage, seed, shared, empty=empty) for stage in stages])

    def forward(
        self,
        tokens: paddle.Tensor,
        position_ids: paddle.Tensor | None = None,
        document_start: paddle.Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> paddle.Tensor:
        """Compute the logits ``[s, b, V_padded]``.

        Args:
            tokens: ``[b, s]`` int64.
            position_ids: ``[b, s]`` int64; None: consecutive positions, starting at the length of the cache.
            document_start: ``[b, s]`` int32, the first absolute position that each position can attend to;
                None: no limit.
            cache: keys and values of earlier positions. This call appends to the cache.
        """
        if position_ids is None:
            past = 0 if cache is None else cache.length
            position_ids = (paddle.arange(tokens.shape[1]) + past).unsqueeze(0).expand_as(tokens)
        state = (tokens, position_ids)
        if document_start is not None:
            state = (*state, document_start)
        for stage in self.stages:
            state = stage(state, cache)
        return state
