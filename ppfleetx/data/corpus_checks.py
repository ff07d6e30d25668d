"""Check corpora before training: compare their files with checksums, and their token ids with
``Model.vocab_size``. Also summarize a corpus."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ppfleetx.config.errors import DataError, MissingDataError
from ppfleetx.config.message_text import counted
from ppfleetx.data.build import load_tokenizer
from ppfleetx.data.checksums import SUFFIXES, Block, checksums_path, read_checksums
from ppfleetx.data.indexed_dataset import IndexedDataset, TokenStore, no_corpus
from ppfleetx.data.tokenized_corpus import find_prefixes, open_tokens
from ppfleetx.data.tokenizer.tokenizer import Tokenizer, check_tokenizer
from ppfleetx.utils.log import get_logger

if TYPE_CHECKING:
    from ppfleetx.config.sections.data import DatasetConfig
    from ppfleetx.config.sections.root import RunConfig


_LEVELS = ("none", "index", "full")
_NAMED = 3  # corpora named in a log line
MAKE_CHECKSUMS = "ppfleetx inspect-data PREFIX --write-checksums"


def verify_corpora(cfg: RunConfig, modes: Iterable[str]) -> None:
    """Compare the corpora of the data sections ``modes``, such as Train, with their checksums, and log the
    result. ``Data.<mode>.dataset.verify`` is the level: none, index or full (`verify_corpus`). Raises
    DataError if a corpus does not match, or if the level is ``full`` and there are no checksums."""
    levels: dict[str, str] = {}
    for dataset, entry in _corpora(cfg, modes):
        for prefix in find_prefixes(entry):
            levels[prefix] = max(levels.get(prefix, "none"), dataset.verify, key=_LEVELS.index)
    if levels:
        found = {prefix: level == "none" or verify_corpus(prefix, level) for prefix, level in levels.items()}
        get_logger().info(_summary(levels, [prefix for prefix, has_any in found.items() if not has_any]))


def _corpora(cfg: RunConfig, modes: Iterable[str]) -> Iterator[tuple[DatasetConfig, str]]:
    """Yield (dataset section, path) for each entry of ``input_dir`` in the data sections ``modes``, such as
    Train. An entry is a tokenized corpus or a directory of corpora."""
    for _, section in cfg.Data.sections(*modes):
        if section.dataset.is_corpus:
            yield from ((section.dataset, entry) for entry in section.dataset.inputs)


def _summary(levels: dict[str, str], without: list[str]) -> str:
    parts = []
    for level, what in (("full", "all"), ("index", "the index"), ("none", "nothing")):
        count = sum(1 for prefix in levels if levels[prefix] == level and prefix not in without)
        if count:
            parts.append(f"{what} of {counted(count, 'corpus')} compared")
    if without:
        more = ", ..." if len(without) > _NAMED else ""
        names = ", ".join(without[:_NAMED]) + more
        parts.append(f"missing for {counted(len(without), 'corpus')} ({names}): {MAKE_CHECKSUMS} makes them")
    return f"checksums of the data: {'; '.join(parts)}"


def verify_corpus(prefix: str, level: str) -> bool:
    """Compare a corpus with its checksums. At level ``index``, the bytes of ``.idx`` and the lengths of both
    files are checked; at level ``full``, also the bytes of ``.bin``. Returns whether the corpus has
    checksums. Raises DataError if the corpus does not match its checksums, if the checksum file is damaged,
    or if ``level`` is ``full`` and there are no checksums."""
    checksums = read_checksums(prefix)
    if checksums is None:
        if level == "full":
            raise DataError(
                f"Data.*.dataset.verify is full, but there is no {checksums_path(prefix)}: {MAKE_CHECKSUMS} "
                "makes it from a .bin/.idx pair as it is now"
            )
        return False
    checksums.check_sizes()
    for block in checksums.damage((".idx",) if level == "index" else SUFFIXES):
        where = describe(block, _opened(prefix))
        raise DataError(f"{where}; ppfleetx inspect-data {prefix} --verify lists all damage")
    return True


def describe(block: Block, corpus: IndexedDataset | None) -> str:
    """Return a sentence that describes a damaged block. For a block of the ``.bin`` file, it also names the
    damaged documents, unless ``corpus`` is None because its index cannot be read."""
    if corpus is None or block.path.suffix != ".bin":
        return str(block)
    sequences = np.searchsorted(corpus.byte_offsets, [block.first, block.end - 1], side="right") - 1
    # An empty sequence starts at the same offset as the next sequence, and an empty document contains no
    # sequence. So the last of several equal boundaries belongs to the sequence or document that has tokens.
    first, last = np.searchsorted(corpus.document_indices, sequences, side="right") - 1
    return f"{block}: documents {first:,} to {last:,}, counted from 0"


def _opened(prefix: str) -> IndexedDataset | None:
    try:
        return IndexedDataset(prefix)
    except DataError:
        return None


def all_damage(prefix: str) -> tuple[list[str], bool]:
    """Find all damage in a corpus. Returns a list of sentences that describe the damage, and whether the
    corpus has checksums. Without checksums, damaged token ids are not found. Raises MissingDataError if the
    corpus does not exist."""
    if not any(Path(f"{prefix}{suffix}").exists() for suffix in SUFFIXES):
        raise no_corpus(prefix)
    has_checksums = checksums_path(prefix).exists()
    try:
        found = _damaged_blocks(prefix) if has_checksums else []
        if not found:
            IndexedDataset(prefix)
    except DataError as error:
        found = [str(error)]
    return found, has_checksums


def _damaged_blocks(prefix: str) -> list[str]:
    checksums = read_checksums(prefix)
    assert checksums is not None
    checksums.check_sizes()
    corpus = _opened(prefix)
    found = [describe(block, corpus) for block in checksums.damage()]
    num_blocks = sum(len(sums.crcs) for sums in checksums.files.values())
    if len(found) == num_blocks > 1:
        found.append(f"all blocks differ: {checksums_path(prefix)} was probably written for another corpus")
    return found


_PART = 1 << 16  # tokens read at a time
_MOST_TOKENS = 1 << 24  # maximum number of tokens checked in all corpora together; takes about 0.1 s
_FEWEST_TOKENS = 1 << 18  # minimum number of tokens checked in each corpus


def token_id_lines(cfg: RunConfig) -> list[str]:
    """Check that the token ids of the tokenizer and of the Train and Eval corpora are below
    ``Model.vocab_size``. Returns a report as lines of text. Large corpora are checked on a sample of their
    tokens. Missing files are not an error; the report mentions them. Raises DataError for a damaged file or
    an id that is too large."""
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
    """Raise DataError if ``tokenizer`` has more ids than ``Model.vocab_size``, except added tokens in a run
    that starts from weights. The message says where the tokenizer and the vocabulary size are configured."""
    try:
        check_tokenizer(tokenizer, cfg.Model.vocab_size, is_trained=any(cfg.weight_sources()))
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
    found: dict[str, None] = {}
    missing = False
    for _, entry in _corpora(cfg, ("Train", "Eval")):
        try:
            found.update(dict.fromkeys(find_prefixes(entry)))
        except MissingDataError:
            missing = True
    return list(found), missing


def check_corpus(corpus: TokenStore, vocab_size: int, *, most_tokens: int = _MOST_TOKENS) -> tuple[int, int]:
    """Check that the token ids of a corpus are below ``vocab_size``. Returns the highest id (-1 if there are
    no tokens), and the number of tokens read. If there are more than ``most_tokens`` tokens, only an evenly
    spaced sample is read. Raises DataError for an id outside the vocabulary."""
    highest, seen = -1, 0
    for first, last in _parts(corpus.num_tokens, most_tokens):
        tokens = corpus.flat(first, last)
        lowest, highest, seen = int(tokens.min()), max(highest, int(tokens.max())), seen + len(tokens)
        if highest >= vocab_size or lowest < 0:
            if lowest < 0:
                raise DataError(
                    f"{corpus.prefix} holds the token id {lowest}, and ids are at least 0. The corpus is "
                    "damaged, or was written with an integer type that is too small"
                )
            raise DataError(
                f"{corpus.prefix} holds the token id {highest}, and the model has ids 0 to {vocab_size - 1} "
                f"(Model.vocab_size = {vocab_size}). Either the corpus was made with another tokenizer, or a "
                f"new model needs -o Model.vocab_size={highest + 1} or more"
            )
    return highest, seen


def _parts(num_tokens: int, most_tokens: int) -> list[tuple[int, int]]:
    if num_tokens <= max(most_tokens, 2 * _PART):  # a sample has at least two parts, which must not overlap
        starts = range(0, num_tokens, _PART)
    else:
        count = max(2, most_tokens // _PART)
        starts = np.linspace(0, num_tokens - _PART, count).astype(np.int64).tolist()
    return [(start, min(start + _PART, num_tokens)) for start in starts]


def summary(prefix: str) -> dict[str, Any]:
    """Return the main figures of a corpus, such as its numbers of documents and tokens, in types that JSON
    can represent. Raises DataError if the corpus is missing or damaged."""
    corpus = open_tokens(prefix)
    sizes, parts = corpus.sizes, _parts(corpus.num_tokens, corpus.num_tokens)
    return {
        "prefix": corpus.prefix,
        "documents": corpus.document_indices.shape[0] - 1,
        "sequences": len(corpus),
        "tokens": corpus.num_tokens,
        "dtype": str(corpus.dtype),
        "shortest_sequence": int(sizes.min()) if len(corpus) else 0,
        "longest_sequence": int(sizes.max()) if len(corpus) else 0,
        "largest_id": max((int(corpus.flat(*part).max()) for part in parts), default=-1),
        "fingerprint": corpus.fingerprint,
        "has_checksums": read_checksums(corpus.prefix) is not None,
    }


def summary_text(facts: dict[str, Any]) -> str:
    lines = [
        f"{facts['prefix']}: {counted(facts['documents'], 'document', ',')}, "
        f"{counted(facts['sequences'], 'sequence', ',')}, {counted(facts['tokens'], 'token', ',')} "
        f"({facts['dtype']})",
        f"sequences of {facts['shortest_sequence']:,} to {counted(facts['longest_sequence'], 'token', ',')}, "
        f"ids up to {facts['largest_id']:,}",
        f"fingerprint {facts['fingerprint']}",
        "it has checksums; --verify compares them"
        if facts["has_checksums"]
        else "it has no checksums; --write-checksums makes them",
    ]
    return "\n".join(lines)
