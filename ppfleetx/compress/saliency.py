"""Measure the importance of attention groups, feed-forward units and experts on calibration data.

The importance of a group or unit is its first-order effect on the loss (Michel et al., "Are Sixteen Heads
Really Better than One?", 2019). The importance of an expert is its share of the sum
of its layer's routing weights.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import paddle

from ppfleetx.checkpoint.reader import Checkpoint
from ppfleetx.checkpoint.state_dict import load_model
from ppfleetx.checkpoint.weights import with_vocabulary
from ppfleetx.compress.prune import GroupsAndUnits
from ppfleetx.config.sections.compress import is_of_quantizer
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.models.gpt.stages import model_stages
from ppfleetx.models.staged_model import StagedModel
from ppfleetx.nn.layer_factory import LocalFactory
from ppfleetx.nn.loss import token_loss
from ppfleetx.nn.moe import Router
from ppfleetx.nn.routing import Routing
from ppfleetx.nn.stage import canonical_parameters

_ROWS = 4  # windows per batch


def saliency_scores(
    checkpoint: Checkpoint, model: ModelConfig, windows: np.ndarray
) -> dict[int, GroupsAndUnits]:
    """Compute the importance of every layer's attention groups and feed-forward units, by layer number.

    Args:
        windows: token ids ``[c, s + 1]``: c windows of s input tokens and one more token for the labels.
    """
    network = _loaded(checkpoint, model)
    parameters = canonical_parameters(network)
    layers = range(model.num_layers)
    read = {(i, name): parameters[f"decoder.layers.{i}.{name}.weight"] for i in layers for name in _READING}
    for parameter in parameters.values():
        parameter.stop_gradient = not any(parameter is weight for weight in read.values())
    sums = dict.fromkeys(read, 0.0)
    for start in range(0, len(windows), _ROWS):
        _backward(network, windows[start : start + _ROWS], model.vocab_size)
        for (layer, name), weight in read.items():
            parts = _READING[name](model)
            # The sum of weight times gradient over a part is the derivative of the loss with respect to a
            # factor that scales the part's output.
            product = (weight.detach() * weight.grad).sum(axis=1).numpy().astype(np.float64)
            sums[layer, name] = sums[layer, name] + np.abs(product.reshape(parts, -1).sum(axis=1))
            weight.clear_gradient(set_to_zero=False)
    return {i: GroupsAndUnits(sums[i, "attention.out_proj"], sums[i, "mlp.fc2"]) for i in layers}


def usage_scores(checkpoint: Checkpoint, model: ModelConfig, windows: np.ndarray) -> dict[int, np.ndarray]:
    """Return how much each expert is used: layer number -> shares ``[experts]``, which add up to 1. An
    expert's share is the sum of its routing weights over all tokens, divided by the sum for all experts of
    the layer.

    Args:
        windows: token ids ``[c, s + 1]``: c windows of s input tokens and one more token, which is not used.
    """
    network, num_experts = _loaded(checkpoint, model), model.moe.num_experts
    routers = [layer for layer in network.sublayers() if isinstance(layer, Router)]
    sums = [np.zeros(num_experts) for _ in routers]

    def count(total: np.ndarray, routing: Routing) -> None:
        choice, weights = (tensor.numpy().reshape(-1) for tensor in (routing.choice, routing.weights))
        total += np.bincount(choice, weights.astype(np.float64), num_experts)

    for router, total in zip(routers, sums, strict=True):
        router.register_forward_post_hook(lambda _, __, output, total=total: count(total, output[0]))
    with paddle.no_grad():
        for start in range(0, len(windows), _ROWS):
            network(paddle.to_tensor(windows[start : start + _ROWS, :-1]))
    layers = model.moe.mixture_layers(model.num_layers)
    return {layer: total / total.sum() for layer, total in zip(layers, sums, strict=True)}


def _loaded(checkpoint: Checkpoint, model: ModelConfig) -> StagedModel:
    """Build the model without dropout, and load the weights of ``checkpoint``."""
    stages = model_stages(model.model_copy(update={"loss_chunks": 1}), LocalFactory())
    network = StagedModel(stages, seed=None)
    network.eval()  # no dropout; gradients are still computed
    scales = [name for name in checkpoint.names() if is_of_quantizer(name)]
    load_model(
        canonical_parameters(network).items(),
        with_vocabulary(checkpoint, model.vocab_size),
        vocab_size=model.vocab_size,
        allow_extra=scales,
    )
    return network


_READING: dict[str, Callable[[ModelConfig], int]] = {
    "attention.out_proj": lambda model: model.kv_heads,
    "mlp.fc2": lambda model: model.ffn_size,
}
"""Linear layer that consumes the outputs of prunable parts -> function that returns their number."""


def _backward(network: StagedModel, windows: np.ndarray, vocab_size: int) -> None:
    tokens, labels = (paddle.to_tensor(part) for part in (windows[:, :-1], windows[:, 1:]))
    mask = paddle.ones(labels.shape)
    (token_loss(network(tokens), labels, mask, vocab_size).loss / mask.sum()).backward()
