"""Convert tokenizers between GGUF metadata and the tokenizer files of transformers. Two kinds of BPE are
supported: byte-level BPE (``gpt2``), and BPE over characters with byte fallback (``llama``)."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from ppfleetx.config.errors import CheckpointError, shown
from ppfleetx.data.tokenizer.json_files import (
    BYTE_LEVEL,
    CONFIG,
    TOKENIZER_FILE,
    make_definition,
    merge_pairs,
)
from ppfleetx.data.tokenizer.tokenizer import Tokenizer, check_tokenizer
from ppfleetx.utils.log import get_logger

_KEY = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_REQUIRED = {"gpt2": ("tokens",), "llama": ("tokens", "scores")}
"""Kind of tokenizer (``tokenizer.ggml.model``) -> metadata keys that it must have."""
_SPACE = "\u2581"
_BYTE_TOKENS = {f"<0x{byte:02X}>" for byte in range(256)}
_NAMED = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}

_DIGITS = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, BYTE_LEVEL]}


def _split(pattern: str) -> dict[str, Any]:
    cut = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [cut, BYTE_LEVEL | {"use_regex": False}]}


def _gpt4_pattern(digits: str) -> str:
    """Return the regular expression with which GPT-4 and similar tokenizers split text.

    Args:
        digits: the regular-expression quantifier for runs of digits. ``{1,3}`` splits a number into groups
            of up to three digits. An empty string splits it into single digits.
    """
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|"
        r"\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_LETTERS = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]%s[\p{Ll}\p{Lm}\p{Lo}\p{M}]%s"
_SUFFIX = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
_GPT4O = (
    _LETTERS % ("*", "+") + _SUFFIX + _LETTERS % ("+", "*") + _SUFFIX
    + r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)  # fmt: skip
"""The regular expression with which GPT-4o and Phi-4-mini split text."""


# A GGUF file names the regular expression that splits text into pieces, but does not contain it.
_PRE_TOKENIZERS = {
    "gpt-2": BYTE_LEVEL,
    "smollm": _DIGITS,
    "llama-bpe": _split(_gpt4_pattern("{1,3}")),
    "dbrx": _split(_gpt4_pattern("{1,3}")),
    "qwen2": _split(_gpt4_pattern("")),
    "gpt-4o": _split(_GPT4O),
}
"""Value of ``tokenizer.ggml.pre`` -> ``pre_tokenizer`` of a ``tokenizer.json``."""
_OTHER_NAMES = {
    **dict.fromkeys(("phi-2", "olmo", "mpt", "jais"), "gpt-2"),
    **dict.fromkeys(("starcoder", "refact", "command-r", "codeshell"), "smollm"),
    **dict.fromkeys(("llama3", "llama-v3", "falcon3", "pixtral"), "llama-bpe"),
    "smaug-bpe": "dbrx",
    **dict.fromkeys(("deepseek-r1-qwen", "stablelm2", "megrez"), "qwen2"),
}
_NOT_STRIPPED = ("<unk>", "<s>", "<|endoftext|>")
_WITH_BOS = ("llama-bpe", "llama")
"""Tokenizers that add BOS at the start of the input, unless the GGUF file says otherwise."""
_IGNORE_MERGES = ("llama-bpe",)
"""Tokenizers that encode a piece of text as one token, without merging, if the piece is in the vocabulary
(``ignore_merges``)."""


# ---- in


def tokenizer_texts(metadata: Mapping[str, Any], place: str) -> dict[str, str]:
    """Make ``tokenizer.json`` and ``tokenizer_config.json`` from GGUF metadata. Returns {file name: content}.

    Args:
        place: the path of the GGUF file, for messages.

    Raises CheckpointError if the tokenizer is incomplete or not supported.
    """
    kind = metadata.get(f"{_KEY}model")
    if kind not in _REQUIRED:
        raise CheckpointError(
            f"{place}: its tokenizer, {_KEY}model {shown(kind)}, is not supported; supported: "
            f"{', '.join(_REQUIRED)}. Give the model's own tokenizer with --tokenizer DIR"
        )
    missing = [key for name in _REQUIRED[kind] if (key := f"{_KEY}{name}") not in metadata]
    if missing:
        raise CheckpointError(f"{place}: its metadata lack {' and '.join(missing)}")
    tokens = metadata[f"{_KEY}tokens"]
    types = metadata.get(f"{_KEY}token_type") or [_NORMAL] * len(tokens)
    vocab = {token: number for number, token in enumerate(tokens) if types[number] != _UNUSED}
    if kind == "gpt2":
        definition, cut = _of_bytes(metadata, vocab, types, place)
    else:
        definition, cut = _of_characters(metadata, vocab, types), kind
    # llama.cpp removes the spaces after special tokens of Phi-3, like Phi-3's own tokenizer.
    strips = kind == "llama" and metadata.get("general.architecture") == "phi3"
    definition["added_tokens"] = [
        _added(number, token, types[number], strips=strips and token not in _NOT_STRIPPED)
        for token, number in vocab.items()
        if types[number] in (_CONTROL, _USER_DEFINED, _UNKNOWN)
    ]
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, theirs in _NAMED.items():
        number = special_id(metadata, name, len(tokens))
        if number is not None and tokens[number] in vocab:
            config[theirs] = tokens[number]
    around = {
        "bos_token": metadata.get(f"{_KEY}add_bos_token", cut in _WITH_BOS),
        "eos_token": metadata.get(f"{_KEY}add_eos_token", False),
    }
    wanted = [name for name, is_added in around.items() if is_added and name in config]
    definition["post_processor"] = _post_processor({name: config[name] for name in wanted}, vocab)
    if isinstance(template := metadata.get(_TEMPLATE), str):
        config["chat_template"] = template
    return {
        TOKENIZER_FILE: json.dumps(definition, ensure_ascii=False),
        CONFIG: json.dumps(config, ensure_ascii=False, indent=2),
    }


def special_id(metadata: Mapping[str, Any], name: str, num_tokens: int) -> int | None:
    """Return the id of the special token ``name``, such as ``bos``, from GGUF metadata. None if the metadata
    have no valid id for it."""
    number = metadata.get(f"{_KEY}{name}_token_id")
    return number if number is not None and 0 <= number < num_tokens else None


def _of_bytes(
    metadata: Mapping[str, Any], vocab: dict[str, int], types: list[int], place: str
) -> tuple[dict[str, Any], str]:
    """Make the ``tokenizer.json`` of a byte-level BPE. Also returns llama.cpp's name for its
    pre-tokenizer."""
    said = metadata.get(f"{_KEY}pre", "default")
    cut = _OTHER_NAMES.get(said, said)
    if said == "default":
        cut = "gpt-2"
        get_logger().warning(f"{place} does not say how its tokenizer splits text; it is read as GPT-2's")
    if cut not in _PRE_TOKENIZERS:
        raise CheckpointError(
            f"{place}: its tokenizer splits text as {shown(said)} ({_KEY}pre), which is not supported; "
            f"supported: {', '.join(_PRE_TOKENIZERS)}. Give the model's own tokenizer with --tokenizer DIR"
        )
    merges = metadata.get(f"{_KEY}merges")
    if merges is None and any(len(token) > 1 and types[number] == _NORMAL for token, number in vocab.items()):
        raise CheckpointError(f"{place}: its metadata lack {_KEY}merges")
    definition = make_definition(vocab, [merge.split(" ") for merge in merges or []], [])
    definition["pre_tokenizer"] = _PRE_TOKENIZERS[cut]
    definition["model"]["ignore_merges"] = cut in _IGNORE_MERGES
    if cut == "qwen2":
        definition["normalizer"] = {"type": "NFC"}
    return definition, cut


def _of_characters(metadata: Mapping[str, Any], vocab: dict[str, int], types: list[int]) -> dict[str, Any]:
    has_prefix = metadata.get(f"{_KEY}add_space_prefix", True)
    spaces: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}]
    decoders = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if has_prefix:
        spaces.insert(0, {"type": "Prepend", "prepend": _SPACE})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    definition = make_definition(vocab, _merges(vocab, types, metadata[f"{_KEY}scores"]), [])
    unknown = next((token for token, number in vocab.items() if types[number] == _UNKNOWN), None)
    definition["model"] |= {"byte_fallback": True, "fuse_unk": True, "unk_token": unknown}
    return definition | {
        "normalizer": {"type": "Sequence", "normalizers": spaces},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
    }


def _merges(vocab: dict[str, int], types: list[int], scores: list[float]) -> list[list[str]]:
    """Make the list of BPE merges from the scores of the tokens. The merges are sorted by the score of the
    token that they produce, highest first."""
    found = []
    for token, number in vocab.items():
        if types[number] != _NORMAL:
            continue
        # Every pair of tokens whose concatenation is this token becomes a merge.
        pairs = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        known = [pair for pair in pairs if pair[0] in vocab and pair[1] in vocab]
        found += [(-scores[number], vocab[left], vocab[right], left, right) for left, right in known]
    return [[left, right] for *_, left, right in sorted(found)]


def _added(number: int, token: str, kind: int, *, strips: bool) -> dict[str, Any]:
    """Make the entry of a token in ``added_tokens`` of a ``tokenizer.json``.

    Args:
        kind: llama.cpp's number for the type of the token.
        strips: whether spaces after the token are removed.
    """
    flags = dict.fromkeys(("single_word", "lstrip", "normalized"), False)
    return {"id": number, "content": token, **flags, "rstrip": strips, "special": kind != _USER_DEFINED}


def _post_processor(wanted: Mapping[str, str], vocab: Mapping[str, int]) -> dict[str, Any] | None:
    """Make the ``post_processor`` of a ``tokenizer.json``, which adds BOS at the start, EOS at the end, or
    both. None if ``wanted`` is empty.

    Args:
        wanted: ``bos_token`` or ``eos_token`` -> the token to add.
        vocab: token -> id.
    """
    if not wanted:
        return None
    pieces = {name: {"SpecialToken": {"id": token, "type_id": 0}} for name, token in wanted.items()}

    def template(sequence: str) -> list[dict[str, Any]]:
        text = {"Sequence": {"id": sequence, "type_id": 0}}
        return [piece for piece in (pieces.get("bos_token"), text, pieces.get("eos_token")) if piece]

    tokens = {one: {"id": one, "ids": [vocab[one]], "tokens": [one]} for one in wanted.values()}
    pair = [*template("A"), *template("B")]
    return {"type": "TemplateProcessing", "single": template("A"), "pair": pair, "special_tokens": tokens}


# ---- out


def tokenizer_metadata(tokenizer: Tokenizer, vocab_size: int) -> dict[str, Any]:
    """Return the GGUF metadata of a tokenizer. Its token list has ``vocab_size`` entries, one for each row of
    the embedding; rows without a token get a placeholder. Raises CheckpointError if llama.cpp does not
    support the tokenizer, or if it has more than ``vocab_size`` tokens."""
    definition = tokenizer.definition
    model = definition["model"]
    if model["type"] != "BPE":
        raise CheckpointError(f"a tokenizer of the kind {shown(model['type'])} cannot be written as GGUF")
    check_tokenizer(tokenizer, vocab_size, is_trained=True)
    listed = definition.get("added_tokens") or []
    added = {one["id"]: one for one in listed if one["id"] < vocab_size}
    ids = {**model["vocab"], **{one["content"]: number for number, one in added.items()}}
    by_id = {number: token for token, number in ids.items()}
    tokens = [by_id.get(number, f"[PAD{number}]") for number in range(vocab_size)]
    is_of_characters = bool(model.get("byte_fallback"))
    _check_normalizer(tokenizer, _NORMALIZERS_OF_CHARACTERS if is_of_characters else _NORMALIZERS_OF_BYTES)
    types = [
        _type_of(by_id.get(number), added.get(number), model if is_of_characters else {})
        for number in range(vocab_size)
    ]
    made: dict[str, Any] = {f"{_KEY}tokens": tokens, f"{_KEY}token_type": types}
    if is_of_characters:
        made |= {
            f"{_KEY}model": "llama",
            f"{_KEY}scores": _scores(model, tokens),
            f"{_KEY}add_space_prefix": _has_space_prefix(definition),
        }
    else:
        merges = [" ".join(pair) for pair in merge_pairs(model)]
        made |= {
            f"{_KEY}model": "gpt2",
            f"{_KEY}pre": _pre_tokenizer_name(tokenizer),
            f"{_KEY}merges": merges,
        }
    named = {
        name: ids[token]
        for name, key in _NAMED.items()
        if (token := tokenizer.special_token_texts.get(key)) in ids
    }
    ends = dict(zip(("eos", "eot"), tokenizer.end_ids, strict=False))
    made |= {f"{_KEY}{name}_token_id": number for name, number in {**named, **ends}.items()}
    made |= {
        f"{_KEY}add_bos_token": bool(tokenizer.prefix_ids),
        f"{_KEY}add_eos_token": bool(tokenizer.suffix_ids),
    }
    template = tokenizer.chat_templates.get("default")
    return made if template is None else made | {_TEMPLATE: template}


def _type_of(token: str | None, added: Mapping[str, Any] | None, characters: Mapping[str, Any]) -> int:
    """Return llama.cpp's number for the type of a token, such as normal, control or byte.

    Args:
        token: the token; None if a row of the embedding has no token.
        added: the token's entry in ``added_tokens`` of the ``tokenizer.json``; None if it has no entry.
        characters: for a BPE over characters, the ``model`` of the ``tokenizer.json``. For a byte-level BPE,
            an empty mapping.
    """
    if token is None:
        return _UNUSED
    if characters and token == characters.get("unk_token"):
        return _UNKNOWN
    if characters and token in _BYTE_TOKENS:
        return _BYTE
    if added is None:
        return _NORMAL
    return _CONTROL if added.get("special") else _USER_DEFINED


def _scores(model: Mapping[str, Any], tokens: list[str]) -> list[float]:
    """Return llama.cpp's score of each token, derived from the BPE merges of ``model``. A token that an
    earlier merge produces gets a higher score."""
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(merge_pairs(dict(model))):
        ranks.setdefault(left + right, rank)
    return [-float(ranks.get(token, len(ranks))) for token in tokens]


def _has_space_prefix(definition: Mapping[str, Any]) -> bool:
    text = json.dumps([definition.get("normalizer"), definition.get("pre_tokenizer")])
    return '"Prepend"' in text or ('"Metaspace"' in text and '"prepend_scheme": "never"' not in text)


# NFC is accepted, although llama.cpp does not apply it. It changes few strings, and GGUF files of Qwen omit
# it as well.
_NORMALIZERS_OF_BYTES = ("NFC",)
_NORMALIZERS_OF_CHARACTERS = ("NFC", "Prepend", "Replace")


def _check_normalizer(tokenizer: Tokenizer, known: Collection[str]) -> None:
    """Raise CheckpointError if a tokenizer has a normalization step that cannot be written as GGUF.

    Args:
        known: the types of steps that are accepted.
    """
    steps = [tokenizer.definition.get("normalizer")]
    for step in steps:
        if step is not None and step["type"] == "Sequence":
            steps += step["normalizers"]
        elif step is not None and step["type"] not in known:
            raise CheckpointError(
                f"{tokenizer.place} has the normalizer {shown(step['type'])}, which cannot be written as GGUF"
            )


def _pre_tokenizer_name(tokenizer: Tokenizer) -> str:
    """Return GGUF's name, such as ``qwen2``, for the pre-tokenizer of ``tokenizer``. Raises CheckpointError
    if the pre-tokenizer is not supported."""
    found = _comparable(tokenizer.definition.get("pre_tokenizer"))
    ignores_merges = bool(tokenizer.definition["model"].get("ignore_merges"))
    names = [name for name, one in _PRE_TOKENIZERS.items() if _comparable(one) == found]
    if names:
        return next((name for name in names if (name in _IGNORE_MERGES) == ignores_merges), names[0])
    raise CheckpointError(
        f"{tokenizer.place} splits text in a way that cannot be written as GGUF; supported: the ways of "
        f"{', '.join(_PRE_TOKENIZERS)}"
    )


def _comparable(pre_tokenizer: Any) -> Any:
    """Return a copy of a ``pre_tokenizer`` that can be compared with others: without settings that do not
    affect tokens, and with defaults filled in."""
    if isinstance(pre_tokenizer, list):
        return [_comparable(one) for one in pre_tokenizer]
    if not isinstance(pre_tokenizer, Mapping):
        return pre_tokenizer
    # The original files of GPT-2 and Pythia are older than use_regex, which is true by default.
    usual = {"use_regex": True} if pre_tokenizer.get("type") == "ByteLevel" else {}
    filled_in = {**usual, **pre_tokenizer}
    return {key: _comparable(value) for key, value in filled_in.items() if key != "trim_offsets"}
