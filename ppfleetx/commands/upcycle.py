"""Implement ``ppfleetx upcycle``, which turns a dense model into a mixture of experts. Each expert starts as
a copy of the dense model's MLP (Komatsuzaki et al., 2023).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ppfleetx.checkpoint.lazy_tensors import LazyTensor, cast
from ppfleetx.checkpoint.model_only import read_ppfleetx, save_weights
from ppfleetx.checkpoint.weights import fitted, network_of, slices_of
from ppfleetx.commands.checkpoint_verbs import Upcycle, open_model, refuse_quantized_or_adapted
from ppfleetx.config.errors import CheckpointError, ConfigError, shown
from ppfleetx.config.resume_policy import network
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.models.gpt.spec import parameter_count, parameter_specs
from ppfleetx.nn.init import Constant, Normal, draw
from ppfleetx.nn.param_spec import ParamSpec
from ppfleetx.utils.log import configure_logging

_EXPERTS, _MLP = ".mlp.experts.", ".mlp."


def upcycle(options: Upcycle) -> Path:
    """Make a mixture of experts from the dense model that the options name, and write it as a checkpoint.
    Returns the checkpoint's directory.
    """
    configure_logging()
    options.check()
    if not 0 <= options.noise <= 1:
        raise ConfigError("must be between 0 and 1", key="--noise", value=options.noise)
    with open_model(options) as (cfg, directory, tokenizer):
        refuse_quantized_or_adapted(cfg, options.checkpoint)
        dense, weights = cfg.Model.model_copy(update={"moe": None}), read_ppfleetx(directory)
        _check_source(weights.model, dense, options.checkpoint)
        _check_mixture(cfg.Model)
        tensors = upcycled(fitted(weights, dense), cfg.Model, seed=options.seed, noise=options.noise)
        made = {"upcycled": asdict(options), "from": Path(weights.place).name}
        step = save_weights(options.output, cfg, slices_of(tensors), tokenizer=tokenizer, source=made)
    before, after = parameter_count(dense), parameter_count(cfg.Model)
    print(f"{before:,} parameters became {after:,}\nwritten: {step}", flush=True)
    return step


def _check_source(described: Mapping[str, Any], dense: ModelConfig, place: str) -> None:
    if not described:
        return
    saved = network_of(described, place)
    if saved.moe is not None:
        raise CheckpointError(
            f"{place} is already a mixture of {saved.moe.num_experts} experts, and their number cannot be "
            "changed without changing what the model computes"
        )
    before, after = network(saved), network(dense)
    if changed := [key for key in before if before[key] != after[key]]:
        raise ConfigError(
            f"is {shown(before[changed[0]])} in the checkpoint, and upcycling changes Model.moe alone",
            key=f"Model.{changed[0]}",
            value=after[changed[0]],
        )


def _check_mixture(model: ModelConfig) -> None:
    moe = model.moe
    assert moe is not None
    if moe.expert_ffn_size not in (None, model.ffn_size):
        raise ConfigError(
            f"each expert is a copy of the MLP, whose inner width is {model.ffn_size}; leave it out",
            key="Model.moe.expert_ffn_size",
            value=moe.expert_ffn_size,
        )
    if moe.shared_experts is not None:
        rule = "upcycling copies the MLP into the experts and has nothing to make shared ones of"
        raise ConfigError(rule, key="Model.moe.shared_experts")
    if not moe.router.normalize or moe.router.scale != 1:
        raise ConfigError(
            "weights that do not add up to 1 would change what the model computes: leave normalize true and "
            "scale 1",
            key="Model.moe.router",
        )


def upcycled(
    dense: Mapping[str, LazyTensor], model: ModelConfig, *, seed: int, noise: float
) -> dict[str, LazyTensor]:
    """Return the parameters of a mixture of experts, by name. They are made from the parameters of a dense
    model.

    Args:
        dense: the parameters of the dense model, by their names in checkpoints.
        model: the configuration of the mixture.
        seed: the seed of the routers' initial values and of the noise.
        noise: standard deviation of the noise that is added to each matrix of an expert, relative to the
            standard deviation of the matrix.
    """
    made = {}
    for name, spec in parameter_specs(model).items():
        if name in dense:
            made[name] = dense[name]
        elif _EXPERTS in name:
            made[name] = _copies(dense[name.replace(_EXPERTS, _MLP)], spec, seed, noise)
        else:
            made[name] = LazyTensor("F32", spec.shape, partial(draw, spec.init, seed, name, spec.shape))
    return made


def _copies(tensor: LazyTensor, spec: ParamSpec, seed: int, noise: float) -> LazyTensor:
    def load() -> np.ndarray:
        values = tensor.read()
        if not noise or isinstance(spec.init, Constant):
            return np.broadcast_to(values, spec.shape)
        values = cast(values, tensor.dtype, "F32")
        added = draw(Normal(noise * float(values.std())), seed, f"{spec.name}.noise", spec.shape)
        return cast(values + added, "F32", tensor.dtype)

    return LazyTensor(tensor.dtype, spec.shape, load)
