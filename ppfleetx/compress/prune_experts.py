"""Remove whole experts from mixture-of-experts layers, the same number from each layer. Shared experts are
kept.

Shape letters: E experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from ppfleetx.checkpoint.lazy_tensors import LazyTensor, cast
from ppfleetx.compress import Criterion
from ppfleetx.compress.prune import LAYER, check_share
from ppfleetx.config.errors import ConfigError
from ppfleetx.config.sections.compress import parts_out
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.config.sections.moe import MoEConfig, is_router_load
from ppfleetx.config.validate import section_of
from ppfleetx.models.gpt.spec import parameter_shapes


def experts_left(model: ModelConfig, ratio: float, *, multiple: int = 1) -> int:
    """Return how many experts remain in each layer after removing the fraction ``ratio``. The result is
    rounded up to a multiple of ``multiple``. Raises ConfigError if no expert can be removed, or if too few
    would remain."""
    check_share(ratio, multiple)
    moe = model.moe
    if moe is None:
        raise ConfigError("the model has no mixtures of experts (Model.moe)", key="--part", value="experts")
    total = moe.num_experts
    left = min(-(-(total - parts_out(total, ratio)) // multiple) * multiple, total)
    if left == total:
        raise ConfigError(
            f"removes none of {total} experts"
            + (f", where what remains must be a multiple of {multiple}" if multiple > 1 else ""),
            key="--ratio",
            value=ratio,
        )
    try:
        section_of(MoEConfig, {**moe.model_dump(), "num_experts": left})
    except ConfigError as error:
        raise ConfigError(
            f"leaves {left} of {total} experts: {error.rule}", key="--ratio", value=ratio
        ) from None
    return left


def pruned_mixtures(model: ModelConfig, num_experts: int) -> ModelConfig:
    values = model.model_dump()
    return ModelConfig(**{**values, "moe": {**values["moe"], "num_experts": num_experts}})


def router_scores(
    tensors: Mapping[str, LazyTensor], model: ModelConfig, criterion: Criterion
) -> dict[int, np.ndarray]:
    """Score experts by the sum of magnitudes (``l1_norm``) or squares (``l2_norm``) of their router weights.
    Returns ``[E]`` by layer number."""
    scores = {}
    for layer in model.moe.mixture_layers(model.num_layers):
        weight = tensors[f"decoder.layers.{layer}.mlp.router.weight"]
        values = np.abs(cast(weight.read(), weight.dtype, "F32").astype(np.float64))
        scores[layer] = (values**2 if criterion == "l2_norm" else values).sum(axis=0)
    return scores


def kept_experts(scores: np.ndarray, num_experts: int, num_groups: int | None) -> np.ndarray:
    """Return the sorted indices of the experts with the largest ``scores [E]``. If scores are equal, the
    first experts are kept. Each of the ``num_groups`` routing groups keeps the same number of experts."""
    grouped = scores.reshape(num_groups or 1, -1)
    best = np.argsort(-grouped, axis=1, kind="stable")[:, : num_experts // len(grouped)]
    return np.sort((best + np.arange(len(grouped))[:, None] * grouped.shape[1]).reshape(-1))


def without_experts(
    tensors: Mapping[str, LazyTensor], model: ModelConfig, small: ModelConfig, kept: Mapping[int, np.ndarray]
) -> Iterator[tuple[str, LazyTensor]]:
    """Yield (name, tensor) of a model after removing experts. Tensors are read lazily. The measured loads of
    the experts are replaced by equal loads.

    Args:
        tensors: the tensors of the original model.
        model, small: the networks before and after.
        kept: the indices of the experts to keep, by layer number.
    """
    before, after = parameter_shapes(model), parameter_shapes(small)
    for name, tensor in tensors.items():
        if name not in after or before[name] == after[name]:
            yield name, tensor
        elif is_router_load(name):  # fractions of the tokens of a step; start again from equal loads
            share = np.full(after[name], 1 / small.moe.num_experts, np.float32)
            yield name, LazyTensor("F32", after[name], lambda share=share: share)
        else:
            axis = next(dim for dim, size in enumerate(before[name]) if size != after[name][dim])
            yield name, _taken(tensor, kept[int(LAYER.fullmatch(name)[1])], axis)


def _taken(tensor: LazyTensor, which: np.ndarray, axis: int) -> LazyTensor:
    shape = tuple(len(which) if dim == axis else size for dim, size in enumerate(tensor.shape))
    return LazyTensor(tensor.dtype, shape, lambda: np.take(tensor.read(), which, axis=axis))
