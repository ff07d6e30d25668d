"""Every key of a Hugging Face ``generation_config.json`` and its counterpart here.

transformers reads these keys from ``generation_config.json`` or, for older models without it, from
``config.json``. A key becomes a key of our ``Generation`` section, or does not affect the generated tokens,
or is left out with a warning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ppfleetx.checkpoint.weights_only import valid_generation_keys
from ppfleetx.config.errors import shown


@dataclass(frozen=True)
class GenerationKey:
    """One key of transformers.

    Attributes:
        ours: the equivalent key of our ``Generation`` section.
        loses: the effect of leaving out the key; None: no effect.
        idle: values with which the key has no effect.
        when: ``sampling`` or ``search`` if the key only affects sampling or beam search.
    """

    ours: str | None = None
    loses: str | None = None
    idle: tuple[Any, ...] = ()
    when: str | None = None


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
}
# The strategy; special tokens, which go with the tokenizer; caches, compilation and speculative decoding,
# which only affect speed; what a call of transformers returns.
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

KEYS: dict[str, GenerationKey] = {
    **{theirs: GenerationKey(ours=ours) for theirs, ours in _SAME.items()},
    **dict.fromkeys(_HARMLESS, GenerationKey()),
    # 20 is the default of transformers.
    "max_length": GenerationKey(
        loses="the prompt counts there; Generation.max_dec_len counts new tokens", idle=(20,)
    ),
    "min_length": GenerationKey(
        loses="the prompt counts there; Generation.min_dec_len counts new tokens", idle=(0,)
    ),
    "max_time": GenerationKey(loses="no limit of time"),
    "stop_strings": GenerationKey(
        loses="Generation.stop ends before such a text, and not behind it", idle=([], "")
    ),
    "top_h": GenerationKey(loses="unlikely tokens are drawn too", when="sampling"),
    "epsilon_cutoff": GenerationKey(loses="unlikely tokens are drawn too", idle=(0,), when="sampling"),
    "eta_cutoff": GenerationKey(loses="unlikely tokens are drawn too", idle=(0,), when="sampling"),
    "encoder_no_repeat_ngram_size": GenerationKey(loses="texts may repeat the prompt", idle=(0,)),
    "encoder_repetition_penalty": GenerationKey(loses="words of the prompt are not favoured", idle=(1,)),
    "begin_suppress_tokens": GenerationKey(loses="texts may begin with these tokens", idle=([],)),
    "sequence_bias": GenerationKey(loses="no sequence is favoured", idle=({}, [])),
    "forced_bos_token_id": GenerationKey(loses="it comes there after prompts of one token alone"),
    "exponential_decay_length_penalty": GenerationKey(loses="long texts are not brought to their end"),
    "renormalize_logits": GenerationKey(
        loses="scores of beams add up as they are", idle=(False,), when="search"
    ),
    "token_healing": GenerationKey(loses="a prompt is continued behind its last token", idle=(False,)),
    "guidance_scale": GenerationKey(loses="texts are not drawn to the prompt", idle=(1,)),
    "watermarking_config": GenerationKey(loses="texts bear no watermark", idle=({},)),
    "penalty_alpha": GenerationKey(loses="no contrastive search", idle=(0,)),
    "dola_layers": GenerationKey(loses="layers are not contrasted"),
    "constraints": GenerationKey(loses="nothing has to come", idle=([],)),
    "force_words_ids": GenerationKey(loses="no word has to come", idle=([],)),
    "num_return_sequences": GenerationKey(loses="one continuation, unless a call asks for more", idle=(1,)),
}
"""Keys by their name in transformers."""
DEFAULTS = {"top_k": 50, "length_penalty": 1.0}
"""Our keys whose default differs in transformers, with that default."""


def generation_defaults(
    own: Mapping[str, Any] | None, config: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Keys of our `Generation` section for a Hugging Face directory, and notes on keys that are left out.

    End tokens are left out, because the tokenizer provides them.

    Args:
        own: the directory's ``generation_config.json``, if it has one.
        config: its ``config.json``, which is used if it has no ``generation_config.json``.
    """
    keys, lost = _translated(config if own is None else own, is_own_file=own is not None)
    valid, errors = valid_generation_keys(keys)
    notes = [f"generation defaults of the source are left out: {error}" for error in errors]
    if lost:
        notes.append(f"generation defaults of the source that do not exist here: {', '.join(lost)}")
    return valid, notes


def _translated(said: Mapping[str, Any], *, is_own_file: bool) -> tuple[dict[str, Any], list[str]]:
    """Return keys of our ``Generation`` section, and a description of each key that is left out.

    Args:
        said: a ``generation_config.json``, or the ``config.json`` of a model without one.
        is_own_file: whether ``said`` is a ``generation_config.json``, whose unknown keys are reported.
    """
    given = {key: value for key, value in said.items() if value is not None}
    samples, searches = given.get("do_sample") is True, _above_one(given.get("num_beams"))
    strategy = "sampling" if samples else "beam_search" if searches else "greedy_search"
    active = {None, *["sampling"] * samples, *["search"] * searches}
    keys = {"decode_strategy": strategy, **DEFAULTS}
    lost = []
    for name, value in given.items():
        key = KEYS.get(name)
        if key is None:
            lost += [(name, value, "it is not known")] * is_own_file
        elif key.ours is not None:
            keys[key.ours] = value
        elif key.loses is not None and key.when in active and value not in key.idle:
            lost.append((name, value, key.loses))
    if samples and searches:
        lost.append(("num_beams", given["num_beams"], "tokens are sampled without beams"))
    if "max_new_tokens" in given:  # takes precedence in transformers
        lost = [one for one in lost if one[0] != "max_length"]
    return keys, [f"{name} = {shown(value)} ({why})" for name, value, why in lost]


def _above_one(value: Any) -> bool:
    return isinstance(value, int) and value > 1
