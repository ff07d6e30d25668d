"""Interpret the files of a tokenizer's directory as Hugging Face transformers 5 does: special tokens, and ids
added before and after the text. Tests compare the ids for GPT-2 and Llama with those of transformers
(``tests/data/tokenizer/test_tokenizer_hf.py``)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ppfleetx.config.errors import DataError, shown
from ppfleetx.data.tokenizer.json_files import (
    ADDED_TOKENS,
    CHAT_TEMPLATE,
    CONFIG,
    END_OF_DOCUMENT,
    GENERATION_CONFIG,
    SPECIAL_TOKENS,
    TokenizerFiles,
)
from ppfleetx.utils.input_files import parse_json

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_GPT2 = "GPT2Tokenizer"
_GPT2_NAMED = dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_DOCUMENT)
_LLAMA, _LLAMA_NAMED = "LlamaTokenizer", {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}

Token = dict[str, Any]
"""An added token as in ``tokenizer.json``: ``content`` and flags, and usually ``id``."""


@dataclass(frozen=True)
class SideFiles:
    """The files beside a ``tokenizer.json``, such as ``tokenizer_config.json``. ``texts`` has their contents
    by file name. ``place`` is their directory, for messages."""

    texts: Mapping[str, str]
    place: str = "the tokenizer"

    def read(self, name: str) -> dict[str, Any]:
        """Return the JSON object in the file ``name``, or an empty dictionary if there is no such file.
        Raises DataError if it is not JSON.
        """
        if name not in self.texts:
            return {}
        return parse_json(self.texts[name].encode(), f"{self.place}/{name}", DataError)

    def named_tokens(self, defaults: Mapping[str, str]) -> dict[str, Token]:
        """Return the special tokens that have a role in transformers, as {role: token}. A role is, for
        example, ``bos_token``. ``defaults`` has tokens, as strings, for roles that the files do not set."""
        config = self.read(CONFIG)
        of_map = {} if "added_tokens_decoder" in config else self.read(SPECIAL_TOKENS)
        # special_tokens_map.json takes precedence over tokenizer_config.json.
        values: dict[str, Any] = {**defaults, **config, **of_map}
        names = [*_NAMED, *(key for key in values if key.endswith("_token") and key not in _NAMED)]
        kept = {key: values[key] for key in names if isinstance(values.get(key), str | dict)}
        return {key: self._token(value, key) | {"special": True} for key, value in kept.items()}

    @property
    def class_name(self) -> str:
        """The name of the tokenizer's class in transformers, from ``tokenizer_config.json``, without the
        ending ``Fast``; empty if the file names none."""
        name = self.read(CONFIG).get("tokenizer_class")
        return name.removesuffix("Fast") if isinstance(name, str) else ""

    @property
    def parses_special_tokens(self) -> bool:
        return self.read(CONFIG).get("split_special_tokens") is not True

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The ids of the end tokens under ``eos_token_id`` in ``generation_config.json``; empty if this key
        is not set. Raises DataError if its value is not one or several token ids."""
        given = self.read(GENERATION_CONFIG).get("eos_token_id")
        ids = [] if given is None else given if isinstance(given, list) else [given]
        if not all(type(one) is int and one >= 0 for one in ids):
            raise DataError(
                f"{self.place}/{GENERATION_CONFIG}: eos_token_id must be token ids, not {shown(given)}"
            )
        return tuple(dict.fromkeys(ids))

    @property
    def chat_templates(self) -> dict[str, str]:
        """The chat templates by name; the standard template is called ``default``. A ``chat_template.jinja``
        takes precedence over ``tokenizer_config.json``. Raises DataError if the templates in that file are
        damaged."""
        if CHAT_TEMPLATE in self.texts:
            return {"default": self.texts[CHAT_TEMPLATE]}
        given = self.read(CONFIG).get("chat_template")
        listed = [{"name": "default", "template": given}] if isinstance(given, str) else given or []
        if not isinstance(listed, list) or not all(_is_template(one) for one in listed):
            raise DataError(
                f"{self.place}/{CONFIG}: chat_template must be a text, or a list of name and template, not "
                f"{shown(given)}"
            )
        return {one["name"]: one["template"] for one in listed}

    def with_eos(self, files: TokenizerFiles, eos: str | None) -> TokenizerFiles:
        """Return a copy of ``files`` with ``eos_token`` set to ``eos`` (None: no change). The key is set in
        ``tokenizer_config.json``, and in ``special_tokens_map.json`` if it is already there. A file that does
        not exist is not added."""
        texts = dict(files.side_texts)
        for name in (CONFIG, SPECIAL_TOKENS):
            content = self.read(name)
            given = content.get("eos_token")
            named = given.get("content") if isinstance(given, dict) else given
            if name in texts and eos not in (None, named) and (name == CONFIG or "eos_token" in content):
                texts[name] = json.dumps(content | {"eos_token": eos}, ensure_ascii=False, indent=2)
        return replace(files, side_texts=texts)

    def added_tokens(self, added: Sequence[Token], named: Iterable[Token]) -> list[Token]:
        """Return the tokens that transformers adds to a tokenizer's vocabulary, in the order in which it adds
        them. ``added`` is the entry ``added_tokens`` of ``tokenizer.json``. ``named`` is the list of special
        tokens that have a role, such as ``bos_token``. Raises DataError if a file is damaged."""
        config, (extra, former) = self.read(CONFIG), self._unnamed_special_tokens()
        named = [*named, *extra]
        if "added_tokens_decoder" in config:
            listed = self._by_id(config["added_tokens_decoder"])
        else:
            special = {token["content"] for token in named}
            ids = self.read(ADDED_TOKENS)
            if not all(type(number) is int for number in ids.values()):
                raise DataError(f"{self.place}/{ADDED_TOKENS} is damaged: it gives each token its id")
            listed = [_token(content, special=content in special) for content in sorted(ids, key=ids.get)]
            listed += [{key: token[key] for key in ("content", *_FLAGS) if key in token} for token in added]
        known = {token["content"] for token in (*added, *listed)}
        return [*listed, *(one for one in (*named, *former) if one["content"] not in known)]

    def _by_id(self, listed: Any) -> list[Token]:
        if not isinstance(listed, dict) or not all(key.isdecimal() for key in listed):
            raise DataError(f"{self.place}/{CONFIG}: added_tokens_decoder must name tokens by their ids")
        ordered = sorted(listed, key=int)
        return [self._token(listed[key], f"added_tokens_decoder.{key}") for key in ordered]

    def _unnamed_special_tokens(self) -> tuple[list[Token], list[Token]]:
        """Return the special tokens that have no role such as ``bos_token``, as two lists. The second has
        those under the legacy key ``additional_special_tokens`` of ``special_tokens_map.json``, and the first
        has all others. If another key or file lists such tokens, the second list is empty, because
        transformers then ignores the legacy key."""
        config = self.read(CONFIG)
        extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
        of_map = {} if "added_tokens_decoder" in config else self.read(SPECIAL_TOKENS)
        more, former = (of_map.get(f"{key}_special_tokens") or [] for key in ("extra", "additional"))
        has_list = any(isinstance(one, list) and one for one in (extra, more))
        tokens = [*self._unnamed(extra), *self._unnamed(more)]
        # transformers ignores the legacy key if another key or file lists special tokens.
        return tokens, [] if has_list else self._unnamed(former)

    def _unnamed(self, listed: Any) -> list[Token]:
        listed = list(listed.values()) if isinstance(listed, dict) else listed
        if not isinstance(listed, list):
            raise DataError(
                f"{self.place}: extra_special_tokens must be a list of tokens, not {shown(listed)}"
            )
        return [self._token(token, "extra_special_tokens") | {"special": True} for token in listed]

    def _token(self, value: Any, key: str) -> Token:
        if isinstance(value, str):
            return _token(value, special=True)
        content = value.get("content") if isinstance(value, dict) else None
        if not isinstance(content, str):
            raise DataError(f"{self.place}/{CONFIG}: {key} is not a token: {shown(value)}")
        special = value.get("special") is True
        return _token(content, special=special) | {k: value[k] for k in _FLAGS if type(value.get(k)) is bool}


def _is_template(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("name", "template"))


def _token(content: str, *, special: bool) -> Token:
    flags = dict.fromkeys(_FLAGS, False) | {"normalized": not special, "special": special}
    return {"content": content} | flags


@dataclass(frozen=True)
class TransformersTokenizer:
    """A tokenizer as ``AutoTokenizer`` of Hugging Face transformers loads it.

    Attributes:
        definition: the content of a ``tokenizer.json``, completed from the other files.
        bos_token, eos_token: BOS and EOS as strings; None if no file names them.
        before, after: the ids that are added before and after the encoded text.
        named: the special tokens that have a role in transformers, as {role: token string}. A role is, for
            example, ``bos_token``.
    """

    definition: dict[str, Any]
    bos_token: str | None
    eos_token: str | None
    before: tuple[int, ...]
    after: tuple[int, ...]
    named: dict[str, str]


def as_transformers(definition: dict[str, Any], side: SideFiles, *, is_file: bool) -> TransformersTokenizer:
    """Return a tokenizer as transformers loads it from ``definition`` and from the files beside it, ``side``.
    ``definition`` is the content of ``tokenizer.json`` and is not modified. ``is_file`` is False if there is
    no such file and ``definition`` was made from ``vocab.json`` and ``merges.txt``. Raises DataError if a
    file is damaged."""
    is_bpe = definition["model"]["type"] == "BPE"
    is_llama = side.class_name == _LLAMA and is_bpe and not _is_byte_level(definition)
    named = side.named_tokens(_LLAMA_NAMED if is_llama else {})
    if side.class_name == _GPT2:
        definition = _with_prefix_space(definition, side.read(CONFIG).get("add_prefix_space"))
    vocab = definition["model"].get("vocab")
    if isinstance(vocab, dict):
        added, table = definition.get("added_tokens") or [], {}
        if is_llama:
            definition = _llama(definition, side)
        else:
            _add(table, vocab, added)
        _add(table, vocab, side.added_tokens(added, named.values()))
        ordered = sorted(table.values(), key=lambda token: token["id"])
        definition = definition | {"added_tokens": ordered}
    bos, eos = (named.get(key, {}).get("content") for key in ("bos_token", "eos_token"))
    if is_file:
        before, after = template_ids(definition.get("post_processor"), side.place)
    else:
        ids = {**vocab, **{one["content"]: one["id"] for one in definition["added_tokens"]}}
        # Without a tokenizer.json, tokenizer_config.json tells which ids surround a text.
        config, start, end = side.read(CONFIG), bos or END_OF_DOCUMENT, eos or END_OF_DOCUMENT
        before = (ids[start],) if config.get("add_bos_token") is True and start in ids else ()
        after = (ids[end],) if config.get("add_eos_token") is True and end in ids else ()
    unsaid = _GPT2_NAMED if side.class_name == _GPT2 else {}
    texts = {**unsaid, **{name: token["content"] for name, token in named.items()}}
    return TransformersTokenizer(definition, bos, eos, before, after, texts)


def _add(table: dict[str, Token], vocab: Mapping[str, int], tokens: Iterable[Token]) -> None:
    """Add ``tokens`` to ``table``, which has the added tokens by their strings. A token that is already in
    ``table`` or ``vocab`` keeps its id. Others get the next free id."""
    following = max((token["id"] + 1 for token in table.values()), default=0)
    for token in tokens:
        content = token["content"]
        if not content:
            continue
        known = table[content]["id"] if content in table else vocab.get(content)
        number = max(following, len(vocab)) if known is None else known
        table[content] = {"id": number} | {key: value for key, value in token.items() if key != "id"}
        following = max(following, number + 1)


def _is_byte_level(definition: Mapping[str, Any]) -> bool:
    return '"ByteLevel"' in json.dumps({key: definition[key] for key in definition if key != "model"})


def _llama(definition: dict[str, Any], side: SideFiles) -> dict[str, Any]:
    """Return ``definition``, the content of a ``tokenizer.json``, with the normalizer, pre-tokenizer, decoder
    and BPE options that transformers 5 uses in its class ``LlamaTokenizer``."""
    config = side.read(CONFIG)
    has_prefix = config.get("add_prefix_space") is not False
    scheme = ("always" if config.get("legacy") is True else "first") if has_prefix else "never"
    decoders = [
        {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if has_prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    space = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": scheme, "split": False}
    model = {key: definition["model"][key] for key in ("vocab", "merges")}
    return definition | {
        "normalizer": None,
        "pre_tokenizer": space,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {"type": "BPE", **model, "fuse_unk": True, "byte_fallback": True, "unk_token": None},
    }


def _with_prefix_space(definition: dict[str, Any], wanted: Any) -> dict[str, Any]:
    """Return ``definition`` with the pre-tokenizer option ``add_prefix_space`` set to ``wanted``, its value
    in ``tokenizer_config.json``. ``definition`` is returned unchanged if its pre-tokenizer is not GPT-2's, or
    if ``wanted`` is neither True nor False."""
    cutting = definition.get("pre_tokenizer") or {}
    if cutting.get("type") != "ByteLevel" or type(wanted) is not bool:
        return definition
    return definition | {"pre_tokenizer": cutting | {"add_prefix_space": wanted}}


def template_ids(processor: Any, place: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids that the ``post_processor`` of a ``tokenizer.json`` adds before and after the encoded
    text. Raises DataError if the ``post_processor`` is damaged or of an unknown kind."""
    kind = processor.get("type") if isinstance(processor, dict) else None
    if processor is None or kind == "ByteLevel":
        return (), ()
    try:
        if kind == "Sequence":
            parts = [template_ids(part, place) for part in processor["processors"]]
            before = [one for prefix, _ in reversed(parts) for one in prefix]
            return tuple(before), tuple(one for _, suffix in parts for one in suffix)
        if kind in ("BertProcessing", "RobertaProcessing"):
            return (int(processor["cls"][1]),), (int(processor["sep"][1]),)
        if kind == "TemplateProcessing":
            return _around(processor)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise DataError(f"{place}: its post-processor {shown(kind)} is damaged") from error
    raise DataError(f"{place}: its post-processor {shown(kind or processor)} is of an unknown kind")


def _around(processor: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    ids: list[list[int]] = [[]]
    for piece in processor["single"]:
        if "Sequence" in piece:
            ids.append([])
        else:
            ids[-1] += processor["special_tokens"][piece["SpecialToken"]["id"]]["ids"]
    before, after = ids  # ValueError unless the template contains the text exactly once
    return tuple(map(int, before)), tuple(map(int, after))
