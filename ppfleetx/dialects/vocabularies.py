"""How many tokens a vocabulary file of another toolkit holds, without a tokenizer library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ppfleetx.config.errors import ConfigError
from ppfleetx.dialects.given import Given

_MAX_BYTES = 64 << 20  # the largest vocabularies, with merges, have about 35 MB


def highest_id(file: Path, one: Given) -> int:
    """The highest id in a ``vocab.json`` or ``tokenizer.json``.

    Raises:
        ConfigError: with the place of ``one``, which names the file: it cannot be read or is no vocabulary.
    """

    def error(rule: str) -> ConfigError:
        return ConfigError(f"{file} {rule}", key=one.key, place=one.place)

    try:
        if file.is_dir():
            raise error("is a directory, and no vocabulary")
        if not file.is_file():
            raise error("is not there; the size of the vocabulary is read from it (or give --vocab-size)")
        if file.stat().st_size > _MAX_BYTES:
            raise error(f"is larger than {_MAX_BYTES:,} bytes, which no vocabulary needs")
        read = json.loads(file.read_text(encoding="utf-8"))
    except ConfigError:
        raise
    except OSError as problem:
        raise error(f"cannot be read: {problem.strerror}") from None
    except (ValueError, RecursionError):
        raise error("is not a vocabulary in JSON") from None
    ids = _ids(read)
    if not ids or not all(type(number) is int and 0 <= number < 2**31 for number in ids):
        raise error("is not a vocabulary: a mapping of tokens to their ids")
    return max(ids)


def _ids(read: Any) -> list[Any]:
    if not isinstance(read, dict):
        return []
    model = read.get("model")
    if not isinstance(model, dict):
        return list(read.values())
    words = model.get("vocab")
    added = read.get("added_tokens")
    more = [token.get("id") for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    if isinstance(words, list):  # of a unigram model: the place is the id
        return [*range(len(words)), *more]
    return [*(words.values() if isinstance(words, dict) else ()), *more]
