"""Mixture-of-experts weights in Megatron-LM's classic checkpoints. Each expert-parallel rank has a file with
its experts, numbered from 0."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ppfleetx.checkpoint.lazy_tensors import LazyTensor, derive
from ppfleetx.config.errors import CheckpointError, shown
from ppfleetx.config.reading.tree import nested
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.dialects.megatron.dialect import ALL_KEYS
from ppfleetx.dialects.megatron.expert_rules import experts
from ppfleetx.dialects.translation import Translation, take
from ppfleetx.dialects.user_options import UserOption

_SECTION = "Model.moe."
_READ = (
    "num_experts", "num_layers", "n_shared_experts", "first_k_dense_replace", "norm_topk_prob", "seq_aux",
    "routed_scaling_factor",
)  # fmt: skip
_REFUSED = ("moe_apply_probs_on_input", "moe_latent_size", "moe_tp_extend_ep")
# The matrix of expert N is called local_experts.N.linear_fc1.weight, or linear_fc1.weightN with Transformer
# Engine. In older versions, one tensor contains the matrices of all experts.
_EXPERT = re.compile(
    r"mlp\.experts\.(?:local_experts\.(?P<layer>\d+)\.)?linear_(?P<linear>fc[12])\."
    r"(?P<kind>weight|bias)(?P<grouped>\d*)"
)
_ALL_TOGETHER = re.compile(r"(.*\.mlp\.experts\.)weight([12])")
_OURS = re.compile(r"(.*\.mlp\.experts\.)(\d+)\.(.+)")


def moe_section(arguments: Mapping[str, Any], place: str) -> dict[str, Any] | None:
    """Convert Megatron's options to the ``Model.moe`` section; None if the network has no experts. Raises
    UserError if an option is not supported."""
    run = Translation("Megatron", place)
    for name, value in arguments.items():
        if name in _READ or name.startswith("moe_"):
            run.given[name] = one = UserOption(name, value, place)
            key = ALL_KEYS.find(name)
            if key is not None and key.convert is not None and value is not None:
                take(one, key, run)
    experts(run)
    found = nested(
        (key.removeprefix(_SECTION), native.value)
        for key, native in run.native.items()
        if key.startswith(_SECTION)
    )
    if not found:
        return None
    refused = [name for name in _REFUSED if arguments.get(name)]
    sliced, tensor = "expert_tensor_parallel_size", arguments.get("tensor_model_parallel_size") or 1
    if (arguments.get(sliced) or tensor) != tensor:  # experts must be sliced like attention
        refused.append(sliced)
    for name in refused:
        raise CheckpointError(
            f"{place}: Megatron's option {name} = {shown(arguments[name])} is not supported"
        )
    return found


def split_experts(
    chunk: Mapping[str, LazyTensor], model: ModelConfig, ep: int
) -> Iterator[tuple[str, LazyTensor]]:
    """Yield a file's tensors. A tensor that contains several experts is split into one tensor per expert.
    ``ep`` is the expert-parallel degree."""
    for name, tensor in chunk.items():
        match = _ALL_TOGETHER.fullmatch(name)
        if match is None or model.moe is None:
            yield name, tensor
            continue
        count, hidden = model.moe.num_experts // ep, model.hidden_size
        size = int(np.prod(tensor.shape)) // (count * hidden)
        if tensor.shape != ((hidden, count * size) if match[2] == "1" else (count * size, hidden)):
            raise CheckpointError(
                f"{name} has shape {list(tensor.shape)}, which does not fit {count} experts"
            )
        inner = (hidden, size) if match[2] == "1" else (size, hidden)
        for number in range(count):
            ours = f"{match[1]}local_experts.{number}.linear_fc{match[2]}.weight"
            yield ours, derive([tensor], inner[::-1], partial(_matrix, (count, *inner), number), name)


def _matrix(shape: tuple[int, ...], number: int, array: np.ndarray) -> np.ndarray:
    return array.reshape(shape)[number].T


def expert_name(in_layer: str) -> str | None:
    """Convert Megatron's name of an expert's parameter to ours; None for other parameters. Both names lack
    the prefix of the layer. The expert keeps the number that it has in the file."""
    match = _EXPERT.fullmatch(in_layer)
    if match is None or bool(match["layer"]) == bool(match["grouped"]):
        return None
    return f"mlp.experts.{match['layer'] or match['grouped']}.{match['linear']}.{match['kind']}"


def params_of_expert_rank(
    tensors: Mapping[str, LazyTensor], rank: int, ep: int, model: ModelConfig
) -> dict[str, LazyTensor]:
    """Return the parameters to take from the file of one expert-parallel rank: its experts, renumbered as in
    the whole layer. From the file of rank 0, all other parameters are taken as well.

    Args:
        ep: the expert-parallel degree.
    """
    found = {}
    for name, tensor in tensors.items():
        match = _OURS.fullmatch(name)
        if match is not None:
            assert model.moe is not None
            number = int(match[2]) + rank * (model.moe.num_experts // ep)
            found[f"{match[1]}{number}.{match[3]}"] = tensor
        elif rank == 0:
            found[name] = tensor
    return found


def stacked(tensors: Mapping[str, LazyTensor], model: ModelConfig, directory: Path) -> dict[str, LazyTensor]:
    """Stack the matrices of each layer's experts into tensors whose first dimension is the expert. Raises
    CheckpointError if experts are missing, unexpected or of different shapes."""
    found, layers = {}, dict[str, dict[int, LazyTensor]]()
    for name, tensor in tensors.items():
        match = _OURS.fullmatch(name)
        if match is None:
            found[name] = tensor
        else:
            layers.setdefault(match[1] + match[3], {})[int(match[2])] = tensor
    for name, of_experts in layers.items():
        wanted = set(range(model.moe.num_experts if model.moe else 0))
        if wrong := wanted ^ of_experts.keys():
            what = "lacks" if wrong & wanted else "has, beyond those of the options,"
            raise CheckpointError(f"{directory} {what} experts {sorted(wrong)} of {name}")
        parts = [of_experts[number] for number in sorted(of_experts)]
        if len({part.shape for part in parts}) > 1:
            raise CheckpointError(f"{directory}: the experts of {name} differ in shape")
        found[name] = derive(parts, (len(parts), *parts[0].shape), lambda *each: np.stack(each), name)
    return found
