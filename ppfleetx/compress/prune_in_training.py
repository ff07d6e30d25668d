"""Structured pruning during training: attention groups and feed-forward units are set to zero and stay zero.
Settings: ``Compress.Prune``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
from paddle import distributed

from ppfleetx.checkpoint.state_dict import changed_on_host, dtype_of, host_array
from ppfleetx.compress.prune import (
    LAYER,
    GroupsAndUnits,
    Parts,
    Sizes,
    check_network,
    kept_of,
    mass_of_parts,
    parts_of,
)
from ppfleetx.config.errors import ConfigError
from ppfleetx.config.registries import ACTIVATIONS
from ppfleetx.config.sections.compress import num_to_remove
from ppfleetx.config.sections.root import RunConfig
from ppfleetx.distributed.context import ParallelContext
from ppfleetx.models.gpt.spec import model_spec
from ppfleetx.parallel.step_runner import StepRunner
from ppfleetx.utils.log import get_logger


class PruningInTraining:
    """Prunes a model during training, on the schedule in ``Compress.Prune``. All ranks must call each
    method together. Raises ConfigError if the network cannot be pruned during training."""

    def __init__(self, cfg: RunConfig, ctx: ParallelContext, runner: StepRunner) -> None:
        assert cfg.Compress.pruning is not None
        self._options, self._model, self._ctx, self._runner = cfg.Compress.pruning, cfg.Model, ctx, runner
        self._cfg = cfg
        self._begun, self._num_zero, self._step = False, (0, 0), -1
        check_network(cfg.Model)
        _check_activation(cfg)

    def before_step(self, step: int) -> None:
        """Prune the model if the schedule says so. Call this before each training step. Raises ConfigError
        if groups or units that were pruned earlier are no longer zero.

        Args:
            step: the number of optimizer steps so far.
        """
        if step <= self._step:
            self._begun, self._num_zero = False, (0, 0)
        self._step, share = step, self._options.share_after(step)
        # The first call after a start or a rollback prunes at any step, because the loaded checkpoint may be
        # older than the latest pruning.
        if not share or (self._begun and not self._options.is_due(step)):
            return
        num_zero = self._counts(share)
        if not any(num_zero):
            return
        self._runner.before_update()  # weights may be changed only after a running save has copied them
        scores = self._scores()
        self._check_zeros(scores)
        num_new = self._set_to_zero(scores, num_zero)
        self._begun, self._num_zero = True, num_zero
        if num_new:
            get_logger().info(f"pruned after {step} steps: {self._summary()}")

    def finish(self) -> None:
        """Log how much was pruned, and the command that removes the zeros from the checkpoint. Call this at
        the end of training. Raises ConfigError if pruned groups or units are no longer zero."""
        if not self._begun:
            return
        self._check_zeros(self._scores())
        options, output = self._options, self._cfg.Engine.save_load.output_dir
        words = [f"--ratio {options.ratio!r}", f"--criterion {options.criterion}"]
        words += [f"--part {options.part}"] if options.part != "both" else []
        get_logger().info(
            f"pruned: {self._summary()}. The smaller model: ppfleetx prune {output} {' '.join(words)} "
            f"--output {output}-pruned"
        )

    @property
    def zero_share(self) -> float:
        """The pruned fraction of the matrices in all layers, by number of elements."""
        zero = total = 0.0
        for own, spec in model_spec(self._model).blocks[0].parameters().items():
            shape = spec.shape
            parts = parts_of(own, shape, self._model) if len(shape) > 1 else None
            if parts is not None:
                size, count = float(np.prod(shape)), shape[parts.axis] // parts.width
                zero += size * self._num_zero[0 if parts.of_groups else 1] / count
                total += size
        return zero / total

    def _counts(self, share: float) -> tuple[int, int]:
        """Return how many attention groups and how many feed-forward units of each layer are to be zero, if
        the fraction ``share`` is pruned."""
        part, model = self._options.part, self._model
        groups = num_to_remove(model.kv_heads, share) if part != "mlp" else 0
        return groups, num_to_remove(model.ffn_size, share) if part != "heads" else 0

    def _summary(self) -> str:
        model, (groups, units) = self._model, self._num_zero
        return (
            f"{groups} of {model.kv_heads} key/value heads and {units} of {model.ffn_size} feed-forward "
            f"units of each layer are zero, {self.zero_share:.1%} of the layers' matrices"
        )

    def _scores(self) -> list[GroupsAndUnits]:
        """Return the scores of the groups and units of each layer. All ranks get the same result."""
        groups, units = self._model.kv_heads, self._model.ffn_size
        # Index 0 holds the sums of out_proj and fc2, index 1 those of qkv and fc1.
        sums = np.zeros((2, self._model.num_layers, groups + units))
        for piece in self._pieces():
            if not piece.is_matrix or not self._runner.writes(piece.parameter):
                continue
            values = host_array(piece.parameter)
            mass = mass_of_parts(values, dtype_of(piece.parameter), piece.parts, self._options.criterion)
            first = piece.first + (0 if piece.parts.of_groups else groups)
            sums[piece.parts.axis, piece.layer, first : first + len(mass)] = mass
        if self._ctx.world_size > 1:
            # Each sum is nonzero on one rank only. Adding the bits as integers is therefore exact, and works
            # on all devices, unlike a float64 all-reduce.
            bits = paddle.to_tensor(sums.view(np.int64))
            distributed.all_reduce(bits)
            sums = bits.numpy().view(np.float64)
        return [GroupsAndUnits(row[:groups], row[groups:]) for row in sums.sum(axis=0)]

    def _check_zeros(self, scores: list[GroupsAndUnits]) -> None:
        for layer, score in enumerate(scores):
            for which, count in zip((score.groups, score.units), self._num_zero, strict=True):
                if np.count_nonzero(which == 0) < count:
                    raise ConfigError(
                        f"what was pruned from layer {layer} did not stay zero: the activation is not zero "
                        "at zero, or something other than gradients changes the weights",
                        key="Compress.Prune.enable",
                        value=True,
                    )

    def _set_to_zero(self, scores: list[GroupsAndUnits], num_zero: tuple[int, int]) -> int:
        """Set the attention groups and feed-forward units with the smallest scores to zero, together with
        their optimizer states. Returns how many of them were not zero before, summed over all layers.

        Args:
            scores: the scores of each layer.
            num_zero: how many groups and how many units of each layer to set to zero.
        """
        groups, units = self._model.kv_heads, self._model.ffn_size
        sizes = Sizes(groups - num_zero[0], units - num_zero[1], tuple(range(len(scores))))
        gone, num_new = [], 0
        for score in scores:
            kept = kept_of(score, sizes)
            parts = np.delete(np.arange(groups), kept.groups), np.delete(np.arange(units), kept.units)
            gone.append(parts)
            num_new += np.count_nonzero(score.groups[parts[0]]) + np.count_nonzero(score.units[parts[1]])
        # No mask is needed: only zeros pass through these parts, forward and backward, so their gradients are
        # zero, and neither optimizer nor weight decay changes them.
        states: dict[str, list[Any]] = {}
        for (name, _), tensor in self._runner.optimizer_state().items():
            states.setdefault(name, []).append(tensor)
        for piece in self._pieces():
            which = gone[piece.layer][0 if piece.parts.of_groups else 1] - piece.first
            which = which[(which >= 0) & (which < piece.count)]
            index = (slice(None),) * piece.parts.axis + (piece.parts.indices(which),)
            for tensor in (piece.parameter, *states.get(piece.name, ())):
                if tuple(tensor.shape) == tuple(piece.parameter.info.local_shape):
                    with changed_on_host(tensor) as values:
                        values[index] = 0
        return num_new

    def _pieces(self) -> Iterator[_Piece]:
        for name, parameter in self._runner.named_parameters():
            found, info = LAYER.fullmatch(name), parameter.info
            parts = None if found is None else parts_of(found[2], info.global_shape, self._model)
            if parts is not None:
                first, count = (size[parts.axis] // parts.width for size in (info.offset, info.local_shape))
                yield _Piece(name, parameter, int(found[1]), parts, first, count)


@dataclass(frozen=True)
class _Piece:
    """This rank's slice of a parameter that can be pruned. The slice consists of whole attention groups or
    feed-forward units.

    Attributes:
        name: the name of the parameter.
        layer: the index of the layer.
        parts: how the parameter is divided into groups or units.
        first: the index of the slice's first group or unit, counted from 0 in the whole layer.
        count: the number of groups or units in the slice.
    """

    name: str
    parameter: Any
    layer: int
    parts: Parts
    first: int
    count: int

    @property
    def is_matrix(self) -> bool:
        return len(self.parameter.info.global_shape) > 1


def _check_activation(cfg: RunConfig) -> None:
    """Raise ConfigError unless the activation function maps zero to zero and has a finite slope at zero.
    Otherwise, pruned units would not stay zero."""
    name = cfg.Model.hidden_act
    given = paddle.zeros([1, 1, 8])
    given.stop_gradient = False
    output = ACTIVATIONS.make(name, given, gives=paddle.Tensor)
    (slope,) = paddle.grad(output, given, paddle.zeros_like(output))
    if bool((output != 0).any()) or bool((slope != 0).any()):
        raise ConfigError(
            "is not zero at zero, so pruned units would come back in training. Train without pruning, and "
            "prune the checkpoint (ppfleetx prune)",
            key="Model.hidden_act",
            value=name,
        )
