"""Type and range of each key of a Hugging Face ``config.json`` that decides the network."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ppfleetx.config.errors import CheckpointError, shown
from ppfleetx.config.fields import MAX_SIZE


@dataclass(frozen=True)
class _Rule:
    """What a value must be. ``types`` are exact: neither true nor 8.0 is an integer."""

    words: str
    types: tuple[type, ...]
    least: float = -math.inf
    below: float = math.inf
    is_optional: bool = False

    def admits(self, value: Any) -> bool:
        if value is None:
            return self.is_optional
        if type(value) not in self.types:
            return False
        return type(value) not in (int, float) or self.least <= value < self.below


_SIZE = _Rule("an integer of at least 1, below 2^31", (int,), 1, MAX_SIZE + 1)
_OPTIONAL_SIZE = _Rule(f"{_SIZE.words}, or null", (int,), 1, MAX_SIZE + 1, is_optional=True)
_POSITIVE = _Rule("a number greater than 0", (int, float), math.ulp(0.0))
_OPTIONAL_POSITIVE = _Rule(f"{_POSITIVE.words}, or null", (int, float), math.ulp(0.0), is_optional=True)
_OPTIONAL_PART = _Rule(
    "a number in (0, 1], or null", (int, float), math.ulp(0.0), math.nextafter(1.0, 2.0), is_optional=True
)
_NOT_NEGATIVE = _Rule("a number of at least 0", (int, float), 0.0)
_FRACTION = _Rule("a number in [0, 1)", (int, float), 0.0, 1.0)
_TRUTH = _Rule("true, false or null", (bool,), is_optional=True)
_NAME = _Rule("a text or null", (str,), is_optional=True)
_OBJECT = _Rule("an object or null", (dict,), is_optional=True)

_VALUES = {
    **dict.fromkeys(("vocab_size", "n_embd", "n_layer", "n_head", "n_positions"), _SIZE),
    **dict.fromkeys(("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"), _SIZE),
    "max_position_embeddings": _SIZE,
    **dict.fromkeys(("n_inner", "num_key_value_heads", "head_dim"), _OPTIONAL_SIZE),
    "original_max_position_embeddings": _OPTIONAL_SIZE,
    "sliding_window": _OPTIONAL_SIZE,
    "max_window_layers": _Rule("an integer of at least 0", (int,), 0, is_optional=True),
    **dict.fromkeys(("layer_norm_epsilon", "layer_norm_eps", "rms_norm_eps"), _POSITIVE),
    "initializer_range": _NOT_NEGATIVE,
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop", "attention_dropout"), _FRACTION),
    "hidden_dropout": _FRACTION,
    **dict.fromkeys(("tie_word_embeddings", "attention_bias", "mlp_bias"), _TRUTH),
    **dict.fromkeys(("use_parallel_residual", "use_sliding_window"), _TRUTH),
    "layer_types": _Rule("a list or null", (list,), is_optional=True),
    **dict.fromkeys(("activation_function", "hidden_act"), _NAME),
    **dict.fromkeys(("rope_parameters", "rope_scaling"), _OBJECT),
    **dict.fromkeys(("rope_theta", "rotary_emb_base"), _OPTIONAL_POSITIVE),
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct"), _OPTIONAL_PART),
}


def check_values(config: Mapping[str, Any]) -> None:
    """Check the values that decide the network, including those of rotary settings.

    Raises:
        CheckpointError: a value has the wrong type or is out of range; names key, value and rule.
    """
    _check(config, "")
    for key in ("rope_parameters", "rope_scaling"):
        if config.get(key) is not None:
            _check(config[key], f"{key}.")


def _check(values: Mapping[str, Any], prefix: str) -> None:
    for key, rule in _VALUES.items():
        if key in values and not rule.admits(values[key]):
            raise CheckpointError(
                f"{prefix}{key} = {shown(values[key])} in config.json: must be {rule.words}"
            )
