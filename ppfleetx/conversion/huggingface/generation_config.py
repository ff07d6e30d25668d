"""Convert a Hugging Face ``generation_config.json`` to our ``Generation`` section. Older models have no such
file. Their generation keys are in ``config.json``, and are read from there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ppfleetx.checkpoint.model_only import valid_generation_keys
from ppfleetx.config.errors import shown

_SAME = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "no_repeat_ngram_size": "no_repeat_ngram_size",
    "bad_words_ids": "bad_words",
    "suppress_tokens": "suppress_tokens",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_dec_len",
    "min_new_tokens": "min_dec_len",
    "num_beams": "num_beams",
    "num_beam_groups": "num_beam_groups",
    "diversity_penalty": "diversity_rate",
    "length_penalty": "length_penalty",
    "early_stopping": "early_stopping",
    "forced_eos_token_id": "forced_eos_token_id",
    "stop_strings": "stop",
}
# Ignored keys: do_sample, which is read separately; special tokens, which the tokenizer provides; caches,
# compilation and speculative decoding, which only affect speed; and the form of transformers' return value.
_HARMLESS = (
    "do_sample", "bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "use_cache",
    "cache_implementation", "cache_config", "max_cache_len", "compile_config", "disable_compile",
    "low_memory", "continuous_batching_config", "prefill_chunk_size", "is_assistant",
    "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold",
    "assistant_early_exit", "assistant_lookbehind", "assistant_ensemble_weight", "target_lookbehind",
    "speculation_type", "use_mtp", "prompt_lookup_num_tokens", "max_matching_ngram_size",
    "output_attentions", "output_hidden_states", "output_scores", "output_logits",
    "return_dict_in_generate", "remove_invalid_values", "transformers_version", "_from_model_config",
    "_commit_hash",
)  # fmt: skip

# Key that we do not support -> the values with which the key has no effect. (20 is transformers' default of
# max_length.)
_WITHOUT_COUNTERPART: dict[str, tuple[Any, ...]] = {
    "max_length": (20,),  # includes the prompt, unlike max_dec_len
    "min_length": (0,),
    "max_time": (),
    "top_h": (),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "begin_suppress_tokens": ([],),
    "sequence_bias": ({}, []),
    "forced_bos_token_id": (),
    "exponential_decay_length_penalty": (),
    "renormalize_logits": (False,),
    "token_healing": (False,),
    "guidance_scale": (1,),
    "watermarking_config": ({},),
    "penalty_alpha": (0,),
    "dola_layers": (),
    "constraints": ([],),
    "force_words_ids": ([],),
    "num_return_sequences": (1,),
}
_OF_SAMPLING, _OF_SEARCH = {"top_h", "epsilon_cutoff", "eta_cutoff"}, {"renormalize_logits"}
KEYS = {*_SAME, *_HARMLESS, *_WITHOUT_COUNTERPART}
"""All generation keys of transformers that are known here, supported or not."""
DEFAULTS = {"top_k": 50, "length_penalty": 1.0}
"""Our key -> transformers' default, where it differs from our own default."""


def generation_defaults(
    own: Mapping[str, Any] | None, config: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Convert the generation defaults of a Hugging Face directory to keys of our `Generation` section. Also
    returns warnings about keys that could not be converted. End tokens are not converted, because the
    tokenizer provides them.

    Args:
        own: the content of ``generation_config.json``; None if the directory has no such file. The keys are
            then read from ``config``.
        config: the content of ``config.json``.
    """
    keys, lost = _translated(config if own is None else own, is_own_file=own is not None)
    valid, errors = valid_generation_keys(keys)
    notes = [f"generation defaults of the source are left out: {error}" for error in errors]
    if lost:
        notes.append(f"generation defaults of the source that do not exist here: {', '.join(lost)}")
    return valid, notes


def _translated(given: Mapping[str, Any], *, is_own_file: bool) -> tuple[dict[str, Any], list[str]]:
    """Convert transformers' generation defaults to keys of our `Generation` section. Also returns a
    description, such as ``top_h = 0.5``, of each default that cannot be converted.

    Args:
        given: the content of a ``generation_config.json`` or a ``config.json``.
        is_own_file: whether ``given`` comes from a ``generation_config.json``. If not, unknown keys are
            ignored, because most keys of a ``config.json`` do not concern generation.
    """
    defaults = {key: value for key, value in given.items() if value is not None}
    samples, beams = defaults.get("do_sample") is True, defaults.get("num_beams")
    searches = isinstance(beams, int) and beams > 1
    strategy = "sampling" if samples else "beam_search" if searches else "greedy_search"
    unused = {*_HARMLESS, *(() if samples else _OF_SAMPLING), *(() if searches else _OF_SEARCH)}
    if "max_new_tokens" in defaults:
        unused.add("max_length")
    keys, lost = {"decode_strategy": strategy, **DEFAULTS}, []
    for name, value in defaults.items():
        if name in _SAME:
            keys[_SAME[name]] = value
        elif name in unused or value in _WITHOUT_COUNTERPART.get(name, ()):
            continue
        # Most unknown keys of a config.json have nothing to do with generation.
        elif name in KEYS or is_own_file:
            lost.append(f"{name} = {shown(value)}")
    if samples and searches:
        lost.append(f"num_beams = {shown(beams)} (tokens are sampled without beams)")
    return keys, lost
