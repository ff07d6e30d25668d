"""Hugging Face's tensors for each parameter of ours, in both directions, from the table of a family.

Ours: linears are ``[in, out]``; matrices that are fused (queries, keys and values; gate and up) are
interleaved, as the ``parts`` of the parameter's declaration say. Vocabulary padding is not mapped: the reader
adds it, and it is dropped on the way back.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.config.validate import section_of
from ppfleetx.conversion.fused import join_parts, split_parts
from ppfleetx.conversion.huggingface.config_keys import model_keys
from ppfleetx.conversion.huggingface.families import FAMILIES, Family
from ppfleetx.models.gpt.spec import parameter_specs
from ppfleetx.nn.param_spec import ParamSpec, Part, Shape


@dataclass(frozen=True)
class Rule:
    """One parameter of ours and the tensors of Hugging Face's that make it up.

    Attributes:
        ours: canonical name.
        theirs: Hugging Face's names; several where it stores the parts of a fused parameter apart.
        shape: of ours, without vocabulary padding.
        parts: of a fused parameter that is laid out in another way there.
        is_transposed: whether its tensors are ``[out, in]``.
    """

    ours: str
    theirs: tuple[str, ...]
    shape: Shape
    parts: tuple[Part, ...]
    is_transposed: bool

    @property
    def shapes(self) -> list[Shape]:
        """Shapes of Hugging Face's tensors."""
        shapes = [self.shape]
        if len(self.theirs) > 1:
            shapes = [(*self.shape[:-1], self.shape[-1] // part.period * part.width) for part in self.parts]
        return [shape[::-1] for shape in shapes] if self.is_transposed else shapes

    def join(self, *arrays: np.ndarray) -> np.ndarray:
        """Ours from theirs. Moves elements, and never computes with them."""
        if self.is_transposed:
            arrays = tuple(array.T for array in arrays)
        if not self.parts:
            return arrays[0]
        if len(arrays) == 1:
            groups = self.shape[-1] // self.parts[0].period
            ends = np.cumsum([groups * part.width for part in self.parts])[:-1]
            arrays = tuple(np.split(arrays[0], ends, axis=-1))
        return join_parts(self.parts, arrays)

    def split(self, array: np.ndarray) -> tuple[np.ndarray, ...]:
        """Theirs from ours, without vocabulary padding."""
        arrays = (array[tuple(map(slice, self.shape))],)
        if self.parts:
            arrays = split_parts(self.parts, array)
            if len(self.theirs) == 1:
                arrays = (np.concatenate(arrays, axis=-1),)
        return tuple(one.T for one in arrays) if self.is_transposed else arrays


def rules(hf_config: Mapping[str, Any]) -> list[Rule]:
    """One rule for every parameter, in model order; GPT-2's names with ``transformer.`` before them.

    Raises:
        UserError: ``config.json`` is not that of a network of ours.
    """
    model = section_of(ModelConfig, model_keys(hf_config) | {"vocab_size_divisible_unit": 1})
    family = FAMILIES[hf_config["model_type"]]
    return [_rule(family, name, spec) for name, spec in parameter_specs(model).items()]


def _rule(family: Family, ours: str, spec: ParamSpec) -> Rule:
    layer, _, kind = ours.rpartition(".")
    number = re.search(r"\.(\d+)\.", layer)
    row = re.sub(r"\.\d+\.", ".{}.", layer)
    theirs = f"{family.names[row]}.{kind}".replace("{}", number[1] if number else "")
    parts = spec.parts if "{part}" in theirs or family.has_parts_in_a_row else ()
    names = [theirs.replace("{part}", part.name) for part in parts] if "{part}" in theirs else [theirs]
    is_linear = spec.kind == "matrix" and not family.has_in_out_linears
    return Rule(ours, tuple(names), spec.shape, parts, is_linear or spec.kind == "head")
