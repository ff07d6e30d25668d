"""Layers of one card: plain Paddle layers whose parameters are whole."""

from __future__ import annotations

import paddle
from paddle import nn

from ppfleetx.config.errors import ConfigError
from ppfleetx.nn.init import Constant, Init
from ppfleetx.nn.linear import Linear
from ppfleetx.nn.norm import LayerNorm, RMSNorm
from ppfleetx.nn.stage import ParamInfo

# Paddle would draw random values that build_stage replaces; zeros cost less.
_ZEROS = nn.initializer.Constant(0.0)
_NORMS = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}


def describe(parameter: paddle.Tensor, init: Init, kind: str) -> None:
    """Attach the info of a parameter that is held whole."""
    shape = tuple(parameter.shape)
    parameter.info = ParamInfo("", shape, (0,) * len(shape), shape, init, kind)


class LocalFactory:
    """The :class:`~ppfleetx.nn.stage.LayerFactory` of a model that is not sliced."""

    def local_count(self, count: int, what: str) -> int:
        return count

    def column_linear(
        self, in_features: int, out_features: int, *, init: Init, bias: bool, kind: str = "matrix"
    ) -> nn.Layer:
        return self._linear(in_features, out_features, init, bias, kind)

    def row_linear(self, in_features: int, out_features: int, *, init: Init, bias: bool) -> nn.Layer:
        return self._linear(in_features, out_features, init, bias, "matrix")

    def _linear(self, in_features: int, out_features: int, init: Init, bias: bool, kind: str) -> nn.Layer:
        layer = Linear(in_features, out_features, bias=bias)
        describe(layer.weight, init, kind)
        if bias:
            describe(layer.bias, Constant(0.0), "bias")
        return layer

    def vocab_embedding(self, padded_vocab_size: int, hidden_size: int, *, init: Init) -> nn.Layer:
        return self._embedding(padded_vocab_size, hidden_size, init, "word_embedding")

    def embedding(self, num_embeddings: int, hidden_size: int, *, init: Init) -> nn.Layer:
        return self._embedding(num_embeddings, hidden_size, init, "position_embedding")

    def _embedding(self, rows: int, hidden_size: int, init: Init, kind: str) -> nn.Layer:
        layer = nn.Embedding(rows, hidden_size, weight_attr=paddle.ParamAttr(initializer=_ZEROS))
        describe(layer.weight, init, kind)
        return layer

    def norm(self, kind: str, size: int, *, epsilon: float, gain: float = 1.0) -> nn.Layer:
        if kind not in _NORMS:
            raise ConfigError(f"must be one of {', '.join(_NORMS)}", key="Model.normalization", value=kind)
        layer = _NORMS[kind](size, epsilon)
        describe(layer.weight, Constant(gain), "norm")
        if getattr(layer, "bias", None) is not None:
            describe(layer.bias, Constant(0.0), "bias")
        return layer

    def dropout(self, probability: float, *, inside_heads: bool = False) -> nn.Layer:
        return nn.Dropout(probability)

    def enter_trunk(self, hidden: paddle.Tensor) -> paddle.Tensor:
        return hidden

    def tied_logits(self, hidden: paddle.Tensor, weight: paddle.Tensor) -> paddle.Tensor:
        return paddle.matmul(hidden, weight, transpose_y=True)
