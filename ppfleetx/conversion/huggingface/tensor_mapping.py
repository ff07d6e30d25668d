"""Convert Hugging Face's tensors to our parameters and back. Our linear weights are ``[in, out]``, and our
fused matrices (q, k, v; gate, up) are interleaved along the output features."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ppfleetx.checkpoint.lazy_tensors import LazyTensor, derive
from ppfleetx.config.errors import CheckpointError
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.config.validate import section_of
from ppfleetx.conversion.huggingface.config_import import model_keys
from ppfleetx.conversion.huggingface.families import FAMILIES
from ppfleetx.conversion.huggingface.family import Family
from ppfleetx.conversion.join_parameters import join_parts, split_parts
from ppfleetx.models.gpt.spec import parameter_specs
from ppfleetx.nn.param_spec import ParamSpec, Part, Shape

_LOAD = "router_load"


@dataclass(frozen=True)
class Rule:
    """How one of our parameters is made from Hugging Face's tensors.

    Attributes:
        ours: the name of our parameter.
        theirs: the names of Hugging Face's tensors, ordered by expert and then by part.
        shape: the shape of our parameter, without vocabulary padding.
        parts: the parts of a fused parameter, such as q, k and v. Empty if the parameter is not fused, or if
            Hugging Face's tensor is fused in the same order.
        is_transposed: whether Hugging Face's tensors are ``[out, in]``.
        num_experts: the number of experts, if each expert has its own tensors; else None.
        num_heads: the number of heads, if Hugging Face's tensor is ``[heads, size]`` and ours a vector; else
            None.
    """

    ours: str
    theirs: tuple[str, ...]
    shape: Shape
    parts: tuple[Part, ...]
    is_transposed: bool
    num_experts: int | None = None
    num_heads: int | None = None

    @property
    def shapes(self) -> list[Shape]:
        """The shapes of the Hugging Face tensors, in the order of ``theirs``."""
        if self.num_heads is not None:
            return [(self.num_heads, self.shape[0] // self.num_heads)]
        shapes = [self._expert_shape]
        if self._tensors_per_expert > 1:
            shapes = [
                (*self._expert_shape[:-1], self._expert_shape[-1] // part.period * part.width)
                for part in self.parts
            ]
        return [shape[::-1] if self.is_transposed else shape for shape in shapes] * (self.num_experts or 1)

    def joined(self, parts: Sequence[LazyTensor], place: str | Path) -> LazyTensor:
        """Return our parameter as a lazy tensor that is built from Hugging Face's tensors.

        Args:
            parts: Hugging Face's tensors, in the order of ``theirs``.
            place: the source of the tensors, for messages.

        Raises CheckpointError if a tensor does not have the shape in ``shapes``.
        """
        for name, part, wanted in zip(self.theirs, parts, self.shapes, strict=True):
            if part.shape != wanted:
                raise CheckpointError(
                    f"{place}: {name} has shape {list(part.shape)}, its configuration asks for {list(wanted)}"
                )
        return derive(parts, self.shape, self.join, self.ours)

    def join(self, *arrays: np.ndarray) -> np.ndarray:
        """Build our parameter from the values of Hugging Face's tensors, given in the order of ``theirs``."""
        if self.num_heads is not None:
            return arrays[0].reshape(self.shape)
        if self.num_experts is None:
            return self._join(*arrays)
        experts = np.empty(self.shape, arrays[0].dtype)
        for expert in range(self.num_experts):
            experts[expert] = self._join(
                *arrays[expert * self._tensors_per_expert : (expert + 1) * self._tensors_per_expert]
            )
        return experts

    def split(self, array: np.ndarray, index: int) -> np.ndarray:
        """Build one Hugging Face tensor from our parameter ``array``, without vocabulary padding.

        Args:
            index: the index of the Hugging Face tensor in ``theirs``.
        """
        if self.num_heads is not None:
            return array.reshape(self.shapes[0])
        if self.num_experts is not None:
            array = array[index // self._tensors_per_expert]
        return self._split(array)[index % self._tensors_per_expert]

    @property
    def _expert_shape(self) -> Shape:
        return self.shape if self.num_experts is None else self.shape[1:]

    @property
    def _tensors_per_expert(self) -> int:
        return len(self.theirs) // (self.num_experts or 1)

    def _join(self, *arrays: np.ndarray) -> np.ndarray:
        if self.is_transposed:
            arrays = tuple(array.T for array in arrays)
        if not self.parts:
            return arrays[0]
        if len(arrays) == 1:
            groups = self._expert_shape[-1] // self.parts[0].period
            ends = np.cumsum([groups * part.width for part in self.parts])[:-1]
            arrays = tuple(np.split(arrays[0], ends, axis=-1))
        return join_parts(self.parts, *arrays)

    def _split(self, array: np.ndarray) -> tuple[np.ndarray, ...]:
        arrays = (array[tuple(map(slice, self._expert_shape))],)
        if self.parts:
            arrays = split_parts(self.parts, array)
            if self._tensors_per_expert == 1:
                arrays = (np.concatenate(arrays, axis=-1),)
        return tuple(one.T for one in arrays) if self.is_transposed else arrays


def rules(hf_config: Mapping[str, Any], names: Mapping[str, str] | None = None) -> list[Rule]:
    """Return one conversion rule for each of our parameters, in model order. The measured loads of experts
    have no rule, because Hugging Face does not store them. Raises UserError if the network is not
    supported.

    Args:
        names: entries that replace some of ``Family.names``.
    """
    family, specs = FAMILIES[hf_config["model_type"]], parameter_specs(network(hf_config)).items()
    names = {**family.names, **family.other_names(hf_config), **(names or {})}
    return [_rule(family, names, name, spec) for name, spec in specs if spec.kind != _LOAD]


def expert_loads(model: ModelConfig) -> dict[str, LazyTensor]:
    """Return the router tensors that record the load of each expert in training, with their initial values.
    The keys are our parameter names."""
    return {
        name: LazyTensor("F32", spec.shape, partial(np.full, spec.shape, spec.init.value, np.float32))
        for name, spec in parameter_specs(model).items()
        if spec.kind == _LOAD
    }


def network(hf_config: Mapping[str, Any]) -> ModelConfig:
    """Return the ``Model`` section for a ``config.json``, without vocabulary padding."""
    return section_of(ModelConfig, model_keys(hf_config) | {"vocab_size_divisible_unit": 1})


def _rule(family: Family, names: Mapping[str, str], ours: str, spec: ParamSpec) -> Rule:
    layer, _, kind = ours.rpartition(".")
    number = re.search(r"\.(\d+)\.", layer)
    row = re.sub(r"\.\d+\.", ".{}.", layer)
    theirs = names.get(f"{row}.{kind}") or f"{names[row]}.{kind}"
    theirs = theirs.replace("{}", number[1] if number else "")
    parts = spec.parts if "{part}" in theirs or family.has_parts_in_a_row else ()
    num_experts = spec.shape[0] if "{expert}" in theirs else None
    tensors = [theirs.replace("{expert}", str(expert)) for expert in range(num_experts or 1)]
    if "{part}" in theirs:
        called = [family.part_names.get(part.name, part.name) for part in parts]
        tensors = [tensor.replace("{part}", part) for tensor in tensors for part in called]
    is_table = spec.kind in ("word_embedding", "position_embedding")
    is_transposed = spec.kind == "head" or not (is_table or family.has_in_out_linears)
    num_heads = len(spec.parts) if spec.kind == "norm" and spec.parts and not parts else None
    return Rule(ours, tuple(tensors), spec.shape, parts, is_transposed, num_experts, num_heads)
