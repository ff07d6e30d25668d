"""Read and write the files of a tokenizer: ``tokenizer.json``, or GPT-2's ``vocab.json`` and ``merges.txt``.
In memory, both are a *definition*: a dictionary with the content of a ``tokenizer.json``."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ppfleetx.config.errors import DataError, MissingDataError, shown
from ppfleetx.utils.input_files import MAX_JSON_BYTES, os_errors, parse_json, read_bounded, read_json
from ppfleetx.utils.output_files import atomic_write

END_OF_DOCUMENT = "<|endoftext|>"
TOKENIZER_FILE, VOCAB_FILE, MERGES_FILE = "tokenizer.json", "vocab.json", "merges.txt"
CONFIG, SPECIAL_TOKENS, ADDED_TOKENS = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
GENERATION_CONFIG, CHAT_TEMPLATE = "generation_config.json", "chat_template.jinja"
SIDE_FILES = (CONFIG, SPECIAL_TOKENS, ADDED_TOKENS, GENERATION_CONFIG, CHAT_TEMPLATE)
"""Other files of a tokenizer's directory that are kept with the definition."""
NAMED_TEMPLATES = "additional_chat_templates"
"""Directory of additional chat templates. Its file ``NAME.jinja`` is the template ``NAME``."""
SENTENCEPIECE_FILE = "tokenizer.model"
GPT2_FILES = "https://huggingface.co/openai-community/gpt2"
"""Where users can get vocab.json and merges.txt of GPT-2. Nothing is downloaded."""
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
"""GPT-2's pre-tokenizer and decoder, as in ``tokenizer.json``."""


def _byte_characters() -> list[str]:
    """Return the printable character by which GPT-2's files represent each byte. This is the character whose
    code is the byte, if it is printable, else the next unused character from U+0100 on."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    characters, extra = [], 0x100
    for byte in range(256):
        if byte in visible:
            characters.append(chr(byte))
        else:
            characters.append(chr(extra))
            extra += 1
    return characters


BYTE_CHARACTERS = _byte_characters()
_BYTE_OF = {character: byte for byte, character in enumerate(BYTE_CHARACTERS)}


def token_to_bytes(token: str) -> bytes | None:
    """Return the bytes of a token that is written in GPT-2's byte alphabet, one character per byte. Returns
    None if it contains other characters.
    """
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return None


@dataclass(frozen=True)
class TokenizerFiles:
    """The contents of a tokenizer's files.

    Attributes:
        definition: the content of ``tokenizer.json``, or its equivalent made from ``vocab.json`` and
            ``merges.txt``.
        has_definition: whether there is a ``tokenizer.json``.
        side_texts: the contents of the other files (`SIDE_FILES`), by file name.
    """

    definition: dict[str, Any]
    has_definition: bool = True
    side_texts: dict[str, str] = field(default_factory=dict)


@os_errors(DataError)
def read_files(path: str | os.PathLike[str]) -> TokenizerFiles:
    """Read a tokenizer's files. ``path`` is a directory, a ``tokenizer.json``, or a ``vocab.json`` beside a
    ``merges.txt``. Files such as ``tokenizer_config.json`` are read only if ``path`` is a directory. Raises
    DataError if there is no tokenizer or its files are damaged."""
    path = Path(path)
    if not path.exists():
        raise MissingDataError(
            f"no tokenizer at {path}: give a directory holding {TOKENIZER_FILE}, or {VOCAB_FILE} and "
            f"{MERGES_FILE}; ppfleetx tokenizer makes one from your text, and GPT-2's is at "
            f"{GPT2_FILES} (nothing is downloaded)"
        )
    if path.is_dir():
        there = [name for name in SIDE_FILES if os.path.lexists(path / name)]
        side = with_named_templates({name: _read_text(path / name) for name in there}, path)
        if os.path.lexists(path / TOKENIZER_FILE):  # true for a broken link, which is then reported as damage
            definition = _checked(read_json(path / TOKENIZER_FILE, error=DataError), path / TOKENIZER_FILE)
            return TokenizerFiles(definition, side_texts=side)
        if os.path.lexists(path / VOCAB_FILE) or os.path.lexists(path / MERGES_FILE):
            definition = read_vocab_and_merges(path / VOCAB_FILE, path / MERGES_FILE)
            return TokenizerFiles(definition, has_definition=False, side_texts=side)
        raise MissingDataError(
            f"{path} holds no tokenizer: neither {TOKENIZER_FILE} nor {VOCAB_FILE} and {MERGES_FILE} is there"
            + _how_to_make(path)
        )
    content = read_json(path, error=DataError)
    if "model" in content:
        return TokenizerFiles(_checked(content, path))
    return TokenizerFiles(read_vocab_and_merges(path, path.with_name(MERGES_FILE)), has_definition=False)


def with_named_templates(texts: dict[str, str], directory: Path) -> dict[str, str]:
    """Move a tokenizer's chat templates into ``tokenizer_config.json``, if it has named ones: files in the
    folder ``additional_chat_templates/`` of ``directory``. ``texts`` and the result have the contents of the
    tokenizer's files, by file name.

    The named templates become a list, which replaces the entry ``chat_template``. The list begins with the
    template of ``chat_template.jinja``, if there is one, under the name ``default``. Without named templates,
    ``texts`` is returned unchanged. Raises DataError if a file is damaged.
    """
    files = sorted((directory / NAMED_TEMPLATES).glob("*.jinja"))
    if not files:
        return texts
    named = {path.stem: _read_text(path) for path in files}
    if CHAT_TEMPLATE in texts:
        named = {"default": texts[CHAT_TEMPLATE], **named}
    # transformers, too, reads templates that are listed in tokenizer_config.json.
    listed = [{"name": name, "template": template} for name, template in named.items()]
    config = texts.get(CONFIG, "{}")
    content = parse_json(config.encode(), str(directory / CONFIG), DataError) | {"chat_template": listed}
    others = {name: text for name, text in texts.items() if name != CHAT_TEMPLATE}
    return others | {CONFIG: json.dumps(content, ensure_ascii=False, indent=2)}


def _how_to_make(directory: Path) -> str:
    own = directory / "tokenizer"  # of a run, a checkpoint or a converted model
    if (own / TOKENIZER_FILE).is_file() or (own / VOCAB_FILE).is_file():
        return f"; there is one in {own}"
    if not (directory / SENTENCEPIECE_FILE).is_file():
        return ""
    return (
        f"; {SENTENCEPIECE_FILE} is not read here, and transformers makes {TOKENIZER_FILE} of it: "
        f'AutoTokenizer.from_pretrained("{directory}").save_pretrained("{directory}")'
    )


def read_vocab_and_merges(
    vocab_path: str | os.PathLike[str], merges_path: str | os.PathLike[str]
) -> dict[str, Any]:
    """Read a ``vocab.json`` and a ``merges.txt`` like GPT-2's. Returns the content of an equivalent
    ``tokenizer.json``, with ``<|endoftext|>`` as a special token if the vocabulary has it. Raises DataError
    if a file is missing or damaged."""
    vocab = read_json(Path(vocab_path), error=DataError)
    lines = _read_text(Path(merges_path)).split("\n")
    merges = []
    for number, line in enumerate(lines, start=1):
        line = line.rstrip("\r")
        if not line or (number == 1 and line.startswith("#version")):
            continue
        pair = line.split(" ")
        if len(pair) != 2:
            raise DataError(
                f"{merges_path}:{number}: expected two tokens and a space between, got {shown(line)}"
            )
        merges.append(pair)
    return _checked(make_definition(vocab, merges, [END_OF_DOCUMENT]), Path(vocab_path))


def make_definition(vocab: dict[str, int], merges: list[list[str]], special: list[str]) -> dict[str, Any]:
    """Return the content of a ``tokenizer.json`` for a byte-level BPE tokenizer like GPT-2's. The tokens of
    ``special`` that are in the vocabulary become special tokens."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": vocab[token], "content": token} | flags for token in special if token in vocab
        ],
        "normalizer": None,
        "pre_tokenizer": BYTE_LEVEL,
        "post_processor": None,
        "decoder": BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": merges,
        },
    }


def write_files(texts: dict[str, str], directory: str | os.PathLike[str]) -> None:
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        with atomic_write(directory / name, "w") as file:
            file.write(text)


def file_texts(files: TokenizerFiles, eod: str | None) -> dict[str, str]:
    """Return the files to write when a tokenizer is saved, as {file name: content}. From a directory with
    these files, ``AutoTokenizer.from_pretrained`` loads the same tokenizer.

    Args:
        files: the contents of the files from which the tokenizer was loaded.
        eod: the end-of-document token; None if there is none.
    """
    definition, model = files.definition, files.definition["model"]
    texts = {CONFIG: _made_config(eod), **files.side_texts}
    if _has_only_vocab_and_merges(definition):
        merges = "".join(f"{left} {right}\n" for left, right in merge_pairs(model))
        texts[VOCAB_FILE] = json.dumps(model["vocab"], ensure_ascii=False)
        texts[MERGES_FILE] = f"#version: 0.2\n{merges}"
    if files.has_definition or CONFIG not in files.side_texts:
        texts[TOKENIZER_FILE] = json.dumps(definition, ensure_ascii=False, indent=1)
    return texts


def _made_config(eod: str | None) -> str:
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "add_prefix_space": False}
    if eod is not None:
        config |= {"bos_token": eod, "eos_token": eod, "unk_token": eod, "pad_token": eod}
    return json.dumps(config, indent=2)


def _has_only_vocab_and_merges(definition: dict[str, Any]) -> bool:
    pre_tokenizer = definition.get("pre_tokenizer") or {}
    is_plain = pre_tokenizer.get("type") == "ByteLevel" and not definition.get("normalizer")
    return is_plain and definition["model"]["type"] == "BPE"


def merge_pairs(model: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the merges of a BPE model as pairs of tokens. Files store a merge as a pair or as "left
    right"."""
    return [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]


def _read_text(path: Path) -> str:
    content = read_bounded(path, MAX_JSON_BYTES, DataError)
    try:
        # No newline translation: a merge may contain any character except a space and the file's line ends.
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"the tokenizer file {path} is damaged: it is not UTF-8 ({error})") from error


def _checked(definition: dict[str, Any], path: Path) -> dict[str, Any]:
    try:
        _check(definition)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        why = f"{error} is missing" if isinstance(error, KeyError) else error
        raise DataError(f"the tokenizer file {path} is damaged: {why}") from error
    return definition


def _check(definition: dict[str, Any]) -> None:
    for key in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if not isinstance(definition.get(key), dict | None):
            raise TypeError(f"{key} is {shown(definition[key])}")
    for added in definition.get("added_tokens") or []:
        if not isinstance(added["content"], str) or not _is_id(added["id"]):
            raise TypeError(f"added token {shown(added)}")
    model = definition["model"]
    if model.setdefault("type", "BPE") != "BPE":  # very old files do not state the type
        return
    vocab = model["vocab"]
    if wrong := [number for number in vocab.values() if not _is_id(number)]:
        raise ValueError(f"token ids must be integers from 0, not {shown(wrong[0])}")
    if len({*vocab.values()}) != len(vocab):
        raise ValueError("two tokens share an id")
    for left, right in merge_pairs(model):
        missing = [token for token in (left, right, left + right) if token not in vocab]
        if missing:
            raise ValueError(f"merge {shown((left, right))} needs {shown(missing[0])}, not in the vocabulary")


def _is_id(value: Any) -> bool:
    return type(value) is int and value >= 0
