"""Convert rotary settings between a Hugging Face ``config.json`` and our ``Model`` section. The keys of
transformers 4 (``rope_theta``, ``rope_scaling``) and 5 (``rope_parameters``) can be read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ppfleetx.config.errors import CheckpointError, ConfigError, shown
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.config.sections.rope import RopeScalingConfig
from ppfleetx.config.validate import section_of

PLACES = ("rope_scaling", "rope_parameters")
DEFAULT_BASE = 10000.0
_TYPES = ("default", "dynamic", "linear", "llama3", "yarn", "longrope")
_ORIGINAL = "original_max_position_embeddings"
_ROTARY_FRACTION = {
    "gpt_neox": 0.25, "glm": 0.5, "glm4": 0.5, "glm4_moe": 0.5, "phi": 0.5, "phi3": 1.0, "stablelm": 0.25,
}  # fmt: skip
"""Model type -> the fraction of each head that is rotated if config.json does not say."""
# Phi-3's default of original_max_position_embeddings. Phi-3 ignores this key inside rope_scaling.
_PHI3_LENGTH = 4096
# Keys that transformers knows. A key that the given scaling type does not use has no effect.
_KNOWN = {
    "rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", _ORIGINAL, "attention_factor",
    "beta_fast", "beta_slow", "short_factor", "long_factor", "low_freq_factor", "high_freq_factor", "mscale",
    "mscale_all_dim", "truncate", "finetuned",
}  # fmt: skip


def rope_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the rotary settings of a ``config.json`` to keys of our ``Model`` section, such as
    ``rotary_base``. Raises CheckpointError for unsupported or invalid settings."""
    config = _with_usual_names(config)
    place, given = _in_effect(config)
    if unknown := sorted(set(given) - _KNOWN):
        raise CheckpointError(
            f"config.json: {place} has {', '.join(shown(key) for key in unknown)}, which is not known here"
        )
    keys = {"rotary_base": _base(config), "rope_scaling": _scaling(place, given, config)}
    kind = config.get("model_type")
    if kind in _ROTARY_FRACTION:
        places = (given.get("partial_rotary_factor"), config.get("partial_rotary_factor"))
        return keys | {"rotary_percent": float(_first(*places, _ROTARY_FRACTION[kind]))}
    for where in (config, given):
        if where.get("partial_rotary_factor") not in (None, 1.0):
            raise CheckpointError(
                f"config.json: partial_rotary_factor of this {kind} is not supported; whole heads are rotated"
            )
    return keys


def rope_notes(config: Mapping[str, Any]) -> list[str]:
    """Return warnings for the user about the rotary settings of a ``config.json``."""
    places = [config.get(place) or {} for place in PLACES]
    of_layers = [place["full_attention"] for place in places if "full_attention" in place]
    if any(_kind(one) == "dynamic" for one in (*places, *of_layers)):
        return [
            "config.json has the rope scaling 'dynamic', which changes nothing up to max_position_embeddings"
        ]
    if of_layers:
        return []
    _, given = _in_effect(config)
    scaling = rope_keys(config)["rope_scaling"]
    if scaling is None or scaling["type"] != "yarn" or not config.get("max_position_embeddings"):
        return []
    ratio = config["max_position_embeddings"] / scaling[_ORIGINAL]
    if _ORIGINAL not in given or ratio == scaling["factor"]:
        return []
    return [
        f"config.json has the YaRN factor {scaling['factor']:g}, and max_position_embeddings is {ratio:g} "
        f"times {_ORIGINAL}; the factor is used, as in transformers 5 (some releases of transformers 4 "
        "compute with the ratio)"
    ]


def hf_rope(model: ModelConfig) -> dict[str, Any]:
    """Convert the rotary settings of ``model`` to ``config.json`` keys that transformers 4 and 5 can read."""
    if model.rope_scaling is None:
        return {"rope_theta": model.rotary_base}
    given = model.rope_scaling.model_dump(mode="json", exclude_none=True)
    keys = {"rope_theta": model.rotary_base, "rope_scaling": {"rope_type": given.pop("type"), **given}}
    if model.rope_scaling.type == "longrope":  # the outer key takes precedence, and has a default in Phi-3
        keys[_ORIGINAL] = model.rope_scaling.original_max_position_embeddings
    return keys


def _with_usual_names(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``config`` with the usual names for rotary keys, such as ``rope_theta``. Older GPT-NeoX models
    use other names."""
    if config.get("model_type") != "gpt_neox" or "partial_rotary_factor" in config:
        return config
    names = {"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"}
    usual = {names[key]: value for key, value in config.items() if key in names and value is not None}
    return {**config, **usual}


def _in_effect(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return the name and value of the ``config.json`` key with the rotary settings: ``rope_scaling`` if it
    is set, otherwise ``rope_parameters``. Raises CheckpointError if the value has separate settings for
    different kinds of layers."""
    # transformers 5 makes the same choice.
    place = next((name for name in PLACES if config.get(name)), PLACES[0])
    given = config.get(place) or {}
    if not isinstance(given, Mapping):
        raise CheckpointError(f"config.json: {place} = {shown(given)} must be a mapping")
    for key, value in given.items():
        if isinstance(value, Mapping):
            raise CheckpointError(
                f"config.json: {place} has settings for {shown(key)} only; all layers must have the same"
            )
    return place, given


def _base(config: Mapping[str, Any]) -> float:
    _, given = _in_effect(config)
    base = given["rope_theta"] if "rope_theta" in given else _first(config.get("rope_theta"), DEFAULT_BASE)
    if base is None:
        raise CheckpointError("config.json: rope_theta must not be null here; give a number")
    return float(base)


def _scaling(place: str, given: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any] | None:
    kind = _kind(given)
    is_phi3 = config.get("model_type") == "phi3"
    if is_phi3 and kind in ("su", "yarn"):
        kind = "longrope"  # its former names
    if kind in ("default", "dynamic"):  # "dynamic" affects only longer sequences than are allowed here
        return None
    if kind not in _TYPES:
        raise CheckpointError(
            f"config.json: rope scaling {shown(kind)} is not supported; supported: {', '.join(_TYPES)}"
        )
    values = {"type": kind, "factor": given.get("factor")}
    longest = config.get("max_position_embeddings")
    if kind != "linear":
        inside = [_PHI3_LENGTH] if is_phi3 else [given.get(_ORIGINAL), longest]
        values[_ORIGINAL] = _first(config.get(_ORIGINAL), *inside)
    if kind == "llama3":
        values |= {key: given.get(key) for key in ("low_freq_factor", "high_freq_factor")}
    if kind in ("yarn", "longrope") and values["factor"] is None:
        values["factor"] = _ratio(longest, values[_ORIGINAL])
    if kind == "yarn":
        values |= _yarn(given)
    if kind == "longrope":
        values |= {key: given.get(key) for key in ("short_factor", "long_factor", "attention_factor")}
        if isinstance(values["factor"], int | float):
            values["factor"] = max(values["factor"], 1.0)  # transformers treats smaller values as 1
    try:
        section = section_of(RopeScalingConfig, values)
    except ConfigError as error:
        raise CheckpointError(f"config.json: rope scaling {shown(kind)} ({place}): {error}") from error
    return section.model_dump(exclude_none=True)


def _yarn(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return YaRN's settings other than the factor and the original context length. As in transformers, 0
    counts as missing for ``beta_fast``, ``beta_slow``, ``mscale`` and ``mscale_all_dim``."""
    values = {"beta_fast": given.get("beta_fast") or None, "beta_slow": given.get("beta_slow") or None}
    values["truncate"] = bool(given.get("truncate", True))
    if given.get("attention_factor") is not None:
        return values | {"attention_factor": given["attention_factor"]}
    if given.get("mscale") and given.get("mscale_all_dim"):
        return values | {key: given[key] for key in ("mscale", "mscale_all_dim")}
    return values


def _kind(scaling: Mapping[str, Any]) -> Any:
    return scaling.get("rope_type", scaling.get("type", "default"))


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _ratio(longest: Any, original: Any) -> float | None:
    if isinstance(longest, int) and isinstance(original, int) and original > 0:
        return longest / original
    return None
