"""Translate the generation options of an lm-evaluation-harness task to our section ``Generation``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ppfleetx.config.errors import ConfigError
from ppfleetx.conversion.huggingface.generation_config import DEFAULTS


def generation_options(asked: Mapping[str, Any], max_new_tokens: int) -> tuple[dict[str, Any], list[str]]:
    """Translate the generation options of a task of lm-evaluation-harness. Returns options of our section
    ``Generation``, and a list of stop strings.

    Args:
        asked: the task's options for ``generate_until``.
        max_new_tokens: the limit on new tokens if the task sets none.

    Raises:
        ConfigError: the task uses an option that our generation does not have.
    """
    left = dict(asked)
    until = left.pop("until", None) or []
    stops = [stop for stop in ([until] if isinstance(until, str) else until) if stop]
    given = [left.pop(key) for key in ("max_gen_toks", "max_new_tokens") if key in left]
    temperature = float(left.pop("temperature", 0.0) or 0.0)
    samples = left.pop("do_sample", temperature > 0)
    options: dict[str, Any] = {"max_dec_len": int(given[0]) if given else max_new_tokens}
    options |= {ours: left.pop(theirs) for theirs, ours in _SAME_MEANING.items() if theirs in left}
    if left:
        name, value = next(iter(left.items()))
        raise ConfigError(f"a task asks for {name} = {value!r}, which generation does not have")
    beams = options.get("num_beams", 1) > 1
    if samples and beams:
        raise ConfigError(
            f"a task asks for num_beams = {options['num_beams']!r} and for sampling, which has no beams here"
        )
    if samples:
        drawn = {"decode_strategy": "sampling", "temperature": temperature or 1.0}
        return {"top_k": DEFAULTS["top_k"], **options, **drawn}, stops
    for key in ("top_k", "top_p", "min_p", "typical_p"):
        options.pop(key, None)
    if beams:
        options.setdefault("length_penalty", DEFAULTS["length_penalty"])
    return {**options, "decode_strategy": "beam_search" if beams else "greedy_search"}, stops


_SAME_MEANING = {
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "no_repeat_ngram_size": "no_repeat_ngram_size",
    "repetition_penalty": "repetition_penalty",
    "num_beams": "num_beams",
    "length_penalty": "length_penalty",
    "early_stopping": "early_stopping",
    "min_new_tokens": "min_dec_len",
}
