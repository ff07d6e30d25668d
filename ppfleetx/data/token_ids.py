"""The ids of tokenizer and corpora against ``Model.vocab_size``, before anything is trained."""

from __future__ import annotations

from collections.abc import Iterator

from ppfleetx.config.errors import DataError, MissingDataError
from ppfleetx.config.sections.root import RunConfig
from ppfleetx.data.build import load_tokenizer
from ppfleetx.data.corpus_formats import find_prefixes, open_tokens
from ppfleetx.data.tokenizer.tokenizer import Tokenizer
from ppfleetx.data.vocabulary import check_corpus, check_tokenizer

_MOST_TOKENS = 1 << 24  # of all corpora; takes a tenth of a second
_FEWEST_TOKENS = 1 << 18  # of each


def token_id_lines(cfg: RunConfig) -> list[str]:
    """What was found out about token ids, as lines of text. Files that are not there are left out: this
    machine need not be the one that trains.

    Raises:
        DataError: a tokenizer or a corpus has an id outside the model's vocabulary, or is damaged.
    """
    return [*_tokenizer_lines(cfg), *_corpus_lines(cfg)]


def _tokenizer_lines(cfg: RunConfig) -> Iterator[str]:
    try:
        tokenizer = load_tokenizer(cfg)
    except MissingDataError:
        yield "the tokenizer is not here; its ids were not compared with Model.vocab_size"
        return
    if tokenizer is not None:
        check_configured_tokenizer(cfg, tokenizer)
        yield f"{tokenizer.place} has {tokenizer.vocab_size} token ids"


def check_configured_tokenizer(cfg: RunConfig, tokenizer: Tokenizer) -> None:
    """`check_tokenizer`, with the places where both were written.

    Raises:
        DataError: the tokenizer has more ids than the model.
    """
    try:
        check_tokenizer(tokenizer, cfg.Model.vocab_size)
    except DataError as error:
        places = {key: place for key, place in cfg.origins.items() if key in _KEYS}
        where = "; ".join(f"{key} is in {place}" for key, place in places.items())
        raise DataError(f"{error}{f' ({where})' if where else ''}") from error


_KEYS = (
    "Model.vocab_size",
    "Data.tokenizer.dir",
    "Data.tokenizer.tokenizer_file",
    "Data.tokenizer.vocab_file",
)


def _corpus_lines(cfg: RunConfig) -> Iterator[str]:
    prefixes, missing = _prefixes(cfg)
    most = max(_FEWEST_TOKENS, _MOST_TOKENS // max(1, len(prefixes)))
    for prefix in prefixes:
        try:
            corpus = open_tokens(prefix)
        except MissingDataError:
            missing = True
            continue
        highest, seen = check_corpus(corpus, cfg.Model.vocab_size, most_tokens=most)
        part = "" if seen == corpus.num_tokens else f" in {seen:,} of {corpus.num_tokens:,} tokens"
        yield f"{prefix} has token ids up to {highest}{part}"
    if missing:
        yield "a corpus is not here; its ids were not compared with Model.vocab_size"


def _prefixes(cfg: RunConfig) -> tuple[list[str], bool]:
    """Corpora of Train and Eval, each once, and whether an entry names none that is there."""
    found: dict[str, None] = {}
    missing = False
    for _, section in cfg.Data.sections("Train", "Eval"):
        if not section.dataset.is_corpus:
            continue
        given = section.dataset.input_dir
        for entry in [given] if isinstance(given, str) else given:
            try:
                found.update(dict.fromkeys(find_prefixes(entry)))
            except MissingDataError:
                missing = True
    return list(found), missing
