"""Convert a ``Model`` section to a Hugging Face ``config.json``, the inverse of
``config_import.model_keys``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ppfleetx.checkpoint.lazy_tensors import NAME_OF_DTYPE
from ppfleetx.config.errors import CheckpointError, UserError, shown
from ppfleetx.config.resume_policy import network
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.config.sections.moe import BalanceLossConfig
from ppfleetx.config.validate import section_of
from ppfleetx.conversion.huggingface.config_import import model_keys
from ppfleetx.conversion.huggingface.families import candidates
from ppfleetx.models.gpt.spec import parameter_shapes

_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def hf_config(
    model: ModelConfig,
    dtype: str,
    *,
    original: Mapping[str, Any] | None = None,
    token_ids: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Make a ``config.json`` for `model`. With it, ``transformers`` builds the same network.

    Args:
        dtype: the element type of the weights, named as in safetensors files.
        original: the ``config.json`` that came with the weights, if any. It is used if it describes the same
            network as `model`. Otherwise, a new ``config.json`` is made.
        token_ids: `bos_token_id` and `eos_token_id` for a new ``config.json``. An id that is not given is
            null, because transformers' default can be outside the vocabulary.

    Raises CheckpointError if no Hugging Face model type can express `model`.
    """
    if original is not None and describes(original, model):
        # auto_map names Python files, which are not copied.
        config = {key: value for key, value in original.items() if key not in ("dtype", "auto_map")}
    else:
        config = _config_of(model) | dict.fromkeys(_TOKENS) | dict(token_ids or {})
    return config | {"torch_dtype": NAME_OF_DTYPE[dtype]}


def describes(config: Mapping[str, Any], model: ModelConfig) -> bool:
    """Return whether a ``config.json`` and a ``Model`` section describe the same network."""
    try:
        return not differences(config, model)
    except UserError:
        return False


def _config_of(model: ModelConfig) -> dict[str, Any]:
    """Make a new ``config.json`` for ``model``. Its ``model_type`` is the first that can express the network.
    Raises CheckpointError if there is none."""
    reasons = []
    for same in (model, _with_experts_width(model)):
        values = network(same)
        for model_type, family in candidates(same).items():
            config = family.config(model_type, same, values)
            try:
                found = differences(config, same)
            except UserError:
                continue
            if not found:
                return config
            reasons.append((len(found), model_type, ", ".join(found)))
    _, nearest, why = min(reasons, key=lambda reason: reason[0])
    raise CheckpointError(
        f"this network cannot be written in Hugging Face's format; the closest kind, {nearest}, differs "
        f"in {why}"
    )


def _with_experts_width(model: ModelConfig) -> ModelConfig:
    """Return ``model`` with ``ffn_hidden_size`` set to the width of the experts, if all layers have experts.
    The network stays the same, because it has no dense MLPs. Some model types need this: they have one key
    for the widths of dense MLPs and of experts."""
    moe = model.moe
    if moe is None or len(moe.mixture_layers(model.num_layers)) < model.num_layers:
        return model
    return model.model_copy(update={"ffn_hidden_size": moe.expert_ffn_size or model.ffn_hidden_size})


def differences(config: Mapping[str, Any], model: ModelConfig) -> list[str]:
    """Return a description of each difference between the network of a ``config.json`` and the network of a
    ``Model`` section. Raises UserError if the ``config.json`` is not supported."""
    other = section_of(ModelConfig, model_keys(config) | {"vocab_size_divisible_unit": 1})
    theirs = network(other)
    found = [
        f"Model.{key} = {shown(value)} (not {shown(theirs[key])})"
        for key, value in network(model).items()
        if value != theirs[key]
    ]
    if not found and parameter_shapes(_as_stored(other)) != parameter_shapes(_as_stored(model)):
        found.append("its parameters")
    return found


def _as_stored(model: ModelConfig) -> ModelConfig:
    """Return a copy of ``model`` without vocabulary padding and without the load-balancing loss of experts.
    Neither affects the weights in a Hugging Face file."""
    moe = model.moe and model.moe.model_copy(update={"aux_loss": BalanceLossConfig(kind="none")})
    return model.model_copy(update={"vocab_size_divisible_unit": 1, "moe": moe})
