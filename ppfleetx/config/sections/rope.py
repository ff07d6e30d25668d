"""Configuration section ``Model.rope_scaling``: rotary frequencies scaled for longer sequences."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import model_validator

from ppfleetx.config.errors import RuleError
from ppfleetx.config.field_types import Bool, FloatFromOne, NonNegativeFloat, PositiveFloat, Size
from ppfleetx.config.section import Section

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The constants of Llama 3.1 to 3.3, except ``factor``. Megatron-LM's ``--use-rope-scaling`` uses the same
ones."""
# The keys that each type needs, and those it may have.
_NEEDED = {
    "linear": (),
    "llama3": ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": ("original_max_position_embeddings",),
    "longrope": ("original_max_position_embeddings", "short_factor", "long_factor"),
}
_OPTIONAL = {
    "yarn": ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
    "longrope": ("attention_factor",),
}
_DEFAULTS = {"yarn": {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}}
REFUSED_TYPES = {
    "dynamic": "its frequencies change with the length of the sequence, so cached keys would be rotated by "
    "other angles than later ones",
}
"""Types that other toolkits support but ppfleetx refuses, with the reason."""


class RopeScalingConfig(Section):
    """Scaling of the rotary frequencies, so that a model can read longer sequences than it was trained on.

    Names, meanings and defaults are those of `rope_scaling` (or `rope_parameters`) in a Hugging Face
    `config.json`. `Model.max_position_embeddings` is the longest sequence after scaling; it does not
    affect the frequencies.
    """

    type: Literal["linear", "yarn", "llama3", "longrope"]
    """`linear` divides all frequencies by `factor` (position interpolation, Chen et al., 2023); `llama3`
    divides only the low ones (Llama 3.1); `yarn` does so too, and scales the attention scores (Peng et al.,
    2023); `longrope` divides each frequency by its own number, and by other numbers in long sequences (Ding
    et al., 2024)."""
    factor: FloatFromOne
    """Factor by which sequences become longer. `linear` divides all frequencies by `factor`, `llama3` and
    `yarn` only the low ones; in `longrope`, it only determines the default of `attention_factor`."""
    original_max_position_embeddings: Size | None = None
    """Longest sequence before scaling (required for yarn, llama3 and longrope)."""
    short_factor: tuple[PositiveFloat, ...] | None = None
    """longrope: the divisor of each frequency in sequences up to `original_max_position_embeddings`."""
    long_factor: tuple[PositiveFloat, ...] | None = None
    """longrope: the divisor of each frequency in longer sequences."""
    low_freq_factor: PositiveFloat | None = None
    """llama3: a frequency that makes fewer turns than this in the original length is divided by `factor`."""
    high_freq_factor: PositiveFloat | None = None
    """llama3: a frequency that makes more turns than this does not change. A frequency between the two bounds
    is divided in part."""
    beta_fast: PositiveFloat | None = None
    """yarn: a frequency that makes more turns than this in the original length does not change; null: 32."""
    beta_slow: PositiveFloat | None = None
    """yarn: a frequency that makes fewer turns than this is divided by `factor`; null: 1."""
    attention_factor: PositiveFloat | None = None
    """yarn, longrope: factor of cos and sin, so that scores are multiplied by its square. null: in yarn, `0.1
    ln(factor) + 1`, or the value from the next two keys; in longrope, `sqrt(1 + ln(factor) / ln(original
    length))`."""
    mscale: NonNegativeFloat | None = None
    """yarn, with the next key: the attention factor is `(0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim
    ln(factor) + 1)`."""
    mscale_all_dim: NonNegativeFloat | None = None
    """See `mscale`."""
    truncate: Bool | None = None
    """yarn: round the bounds between unchanged and divided frequencies to whole indices; null: true."""

    def switch_length(self, max_positions: int) -> int | None:
        """The number of tokens up to which a sequence uses longrope's short factors; None if all sequences
        use the same factors."""
        original = self.original_max_position_embeddings
        return original if self.type == "longrope" and max_positions > original else None

    def __repr__(self) -> str:
        """The section as inline YAML, as ``-o Model.rope_scaling=`` accepts it."""
        given = self.model_dump(mode="json", exclude_none=True)
        return "{" + ", ".join(f"{key}: {json.dumps(value)}" for key, value in given.items()) + "}"

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, values: Any) -> Any:
        """Validator that refuses unsupported types of scaling, and fills in the defaults of the supported
        ones."""
        if not isinstance(values, dict) or not isinstance(values.get("type"), str):
            return values
        if values["type"] in REFUSED_TYPES:
            raise RuleError(("type",), f"{values['type']} is not supported: {REFUSED_TYPES[values['type']]}")
        defaults = _DEFAULTS.get(values["type"], {})
        return values | {key: value for key, value in defaults.items() if values.get(key) is None}

    def violations(self) -> Iterator[RuleError]:
        needed, optional = _NEEDED[self.type], _OPTIONAL.get(self.type, ())
        for key in needed:
            if getattr(self, key) is None:
                yield RuleError((key, "type"), f"type {self.type} needs it")
        for key in type(self).model_fields:
            if key in ("type", "factor", *needed, *optional) or getattr(self, key) is None:
                continue
            kinds = [kind for kind in _NEEDED if key in (*_NEEDED[kind], *_OPTIONAL.get(kind, ()))]
            yield RuleError((key, "type"), f"type {self.type} has no such key; it belongs to {kinds[0]}")
        if self.type == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            yield RuleError(
                ("high_freq_factor", "low_freq_factor"),
                "high_freq_factor must be the greater one",
            )
        if self.type == "yarn" and self.beta_fast < self.beta_slow:
            yield RuleError(("beta_fast", "beta_slow"), "beta_fast must not be less than beta_slow")
        if self.type == "longrope" and self.original_max_position_embeddings == 1:
            yield RuleError(("original_max_position_embeddings",), "longrope divides by its logarithm")
        if (self.mscale is None) != (self.mscale_all_dim is None):
            yield RuleError(("mscale", "mscale_all_dim"), "mscale and mscale_all_dim are given together")
        if self.mscale is not None and self.attention_factor is not None:
            yield RuleError(
                ("attention_factor", "mscale", "mscale_all_dim"),
                "give the attention factor itself or the two numbers it follows from, not both",
            )
