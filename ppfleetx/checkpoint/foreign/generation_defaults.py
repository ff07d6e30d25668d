"""How a model is meant to continue text, as its source says it: keys of our `Generation` section."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ppfleetx.checkpoint.documents import OF_ONE_CALL
from ppfleetx.config.errors import ConfigError
from ppfleetx.config.sections.generation import GenerationConfig
from ppfleetx.config.validate import section_of
from ppfleetx.models.gpt.hf_generation import generation_keys
from ppfleetx.utils.log import get_logger


def of_transformers(
    own: Mapping[str, Any] | None, config: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """What a directory of Hugging Face says, and notes on what is left out of it.

    End tokens go with the tokenizer.

    Args:
        own: its ``generation_config.json``, if it has one.
        config: its ``config.json``, which holds where it has none.
    """
    keys, lost = generation_keys(config if own is None else own, is_own_file=own is not None)
    sound, wrong = _sound(keys)
    notes = [f"generation defaults of the source are left out: {error}" for error in wrong]
    if lost:
        notes.append(f"generation defaults of the source that do not exist here: {', '.join(lost)}")
    return sound, notes


def of_configuration(config: Mapping[str, Any] | str | None) -> dict[str, Any]:
    """What the configuration in a manifest says."""
    section = config.get("Generation") if isinstance(config, Mapping) else None
    if not isinstance(section, Mapping):
        return {}
    sound, wrong = _sound({key: value for key, value in section.items() if key not in OF_ONE_CALL})
    for error in wrong:
        get_logger().warning(f"generation defaults of the source are left out: {error}")
    return sound


def _sound(keys: Mapping[str, Any]) -> tuple[dict[str, Any], list[ConfigError]]:
    """``keys`` without those that are wrong, and what is wrong with them."""
    good, errors = dict(keys), []
    while True:
        try:
            section = section_of(GenerationConfig, good)
        except ConfigError as error:
            errors.append(error)
            if good.pop(str(error.key), None) is None:  # it takes several keys to be wrong
                good = {key: value for key, value in good.items() if key == "decode_strategy"}
        else:
            return section.model_dump(mode="json", include=good.keys()), errors
