"""How a model is meant to continue text, as its source says it: keys of our `Generation` section."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ppfleetx.checkpoint.documents import OF_ONE_CALL
from ppfleetx.config.errors import ConfigError
from ppfleetx.config.sections.generation import GenerationConfig
from ppfleetx.config.validate import section_of
from ppfleetx.utils.log import get_logger

# transformers' names (GenerationConfig) that mean the same under one of ours.
_SAME = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_dec_len",
    "min_new_tokens": "min_dec_len",
    "num_beams": "num_beams",
    "num_beam_groups": "num_beam_groups",
    "diversity_penalty": "diversity_rate",
    "length_penalty": "length_penalty",
    "early_stopping": "early_stopping",
}


def of_transformers(said: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a ``generation_config.json`` says; end tokens aside, which go with the tokenizer."""
    said = said or {}
    keys = {ours: said[theirs] for theirs, ours in _SAME.items() if said.get(theirs) is not None}
    if "do_sample" in said or keys:
        beams = (said.get("num_beams") or 1) > 1
        keys["decode_strategy"] = (
            "sampling" if said.get("do_sample") else "beam_search" if beams else "greedy_search"
        )
        if said.get("do_sample"):
            keys.setdefault("top_k", 50)  # transformers' own default
    return checked(keys)


def of_configuration(config: Mapping[str, Any] | str | None) -> dict[str, Any]:
    """What the configuration in a manifest says."""
    section = config.get("Generation") if isinstance(config, Mapping) else None
    if not isinstance(section, Mapping):
        return {}
    return checked({key: value for key, value in section.items() if key not in OF_ONE_CALL})


def checked(keys: dict[str, Any]) -> dict[str, Any]:
    """``keys`` if they make a sound section; else none, with a warning."""
    try:
        section = section_of(GenerationConfig, keys)
    except ConfigError as error:
        get_logger().warning(f"generation defaults of the source are left out: {error}")
        return {}
    return section.model_dump(mode="json", include=keys.keys())
