"""The corpora, tokenizer and checkpoints of the configuration: readable, undamaged, and large enough."""

from __future__ import annotations

import hashlib
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ppfleetx.checkpoint.directory import resolve_checkpoint, weight_sources
from ppfleetx.checkpoint.manifest import MANIFEST_FILE
from ppfleetx.config.counts import counted
from ppfleetx.config.errors import DataError, UserError
from ppfleetx.config.sections.root import RunConfig, data_sets
from ppfleetx.conversion.detect import refuse_foreign
from ppfleetx.data.build import build_dataset, load_tokenizer, open_corpora
from ppfleetx.data.checksums import BLOCK_BYTES, Block, CorpusChecksums, checksums_path, read_checksums
from ppfleetx.data.gpt_dataset import MODES, split_ranges
from ppfleetx.data.token_ids import token_id_lines
from ppfleetx.data.token_store import TokenStore
from ppfleetx.doctor.case import Case
from ppfleetx.doctor.rows import Row, fail, ok, skipped, warn
from ppfleetx.utils.foreign_files import opened

_CURE = "mount or copy the files to this machine, or correct the path: it is the same for all machines"
_DENIED_CURE = "let this user read it: chmod a+r FILE, and a+x on the directories above; or run as its owner"
_DAMAGED_CURE = "copy it again from where it is whole, or make it again (ppfleetx prepare)"
_BLOCKS, _BLOCKS_COMPARED = 256, 64
"""Blocks of 1 MiB, spread over a file, that are read; smaller files are read completely."""
_READ_SECONDS = 30.0  # for all corpora of a mode
_DAMAGE = ("truncated", "damaged", "not as it was written", "input/output")
_MODES = ("Train", "Eval")


def data(case: Case) -> Iterator[Row]:
    """Open every corpus and text file of ``Data.Train`` and ``Data.Eval``, and read both ends."""
    found, unguarded = False, list[str]()
    for mode, name, cfg in _sets(case.cfg):
        found = True
        title = f"Data.{mode}" if name is None else f"Data.{mode} {name}"
        try:
            texts = list(_look(cfg, mode, unguarded))
        except (UserError, OSError) as error:
            yield fail(title, str(error), _cure(error))
            continue
        yield ok(title, "; ".join(texts))
    if unguarded:
        names = ", ".join(dict.fromkeys(unguarded))
        yield warn(
            "checksums",
            f"none beside {names}: damage on disk would go unnoticed",
            "ppfleetx inspect-data PREFIX --write-checksums writes them",
        )
    if not found:
        yield skipped("data", "the configuration has neither Data.Train nor Data.Eval")


def _cure(error: Exception) -> str:
    text = str(error).lower()
    if "permission denied" in text:
        return _DENIED_CURE
    return _DAMAGED_CURE if any(word in text for word in _DAMAGE) else _CURE


def _sets(cfg: RunConfig) -> Iterator[tuple[str, str | None, RunConfig]]:
    for mode in _MODES:
        for name, one in data_sets(cfg, mode).items():
            yield mode, name, one


def _look(cfg: RunConfig, mode: str, unguarded: list[str]) -> Iterator[str]:
    """What is there; adds corpora without checksums to ``unguarded``."""
    if not getattr(cfg.Data, mode).dataset.is_corpus:
        yield f"{len(build_dataset(cfg, mode)):,} examples"
        return
    corpora = corpora_of(cfg, mode)
    _has_a_sample(corpora, cfg, mode)
    end = time.monotonic() + _READ_SECONDS
    for corpus in corpora:
        sums = read_checksums(corpus.prefix)
        kept = ""
        if sums is None:
            unguarded.append(corpus.prefix)
        else:
            sums.check_sizes()
            kept = f", {_as_written(sums, end)} as in {checksums_path(corpus.prefix).name}"
        ends = corpus.flat(0, 1).sum() + corpus.flat(corpus.num_tokens - 1, corpus.num_tokens).sum()
        assert ends >= 0
        yield f"{corpus.prefix}: {corpus.num_tokens:,} tokens in {len(corpus):,} sequences{kept}"


def _has_a_sample(corpora: Sequence[TokenStore], cfg: RunConfig, mode: str) -> None:
    """Raises DataError if no corpus has the tokens of one sample in the split."""
    options = getattr(cfg.Data, mode).dataset
    ranges = [split_ranges(len(corpus), options.split)[MODES.index(mode)] for corpus in corpora]
    most = max(int(one.sizes[first:last].sum()) for one, (first, last) in zip(corpora, ranges, strict=True))
    if most <= options.max_seq_len:
        raise DataError(
            f"{corpora[0].prefix}: the {mode} split has {counted(most, 'token', ',')}, and one sample needs "
            f"{options.max_seq_len + 1:,}. Give {mode} a larger share of `split`, more text, or a shorter "
            "max_seq_len"
        )


def _as_written(sums: CorpusChecksums, end: float) -> str:
    """Compare a corpus with its checksums until ``end`` (monotonic); says how much was compared.

    Raises:
        DataError: a block is damaged.
    """
    is_whole = True
    for suffix, one in sums.files.items():
        path, numbers = Path(f"{sums.prefix}{suffix}"), spread(len(one.crcs), _BLOCKS)
        is_whole &= len(numbers) == len(one.crcs)
        for number, data in _blocks(path, numbers):
            if zlib.crc32(data) != one.crcs[number]:
                first = number * BLOCK_BYTES
                raise DataError(f"damaged: {Block(path, number, first, first + len(data))}")
            if time.monotonic() > end:
                is_whole = False
                break
    return "every byte" if is_whole else "sizes and a sample of blocks"


def _blocks(path: Path, numbers: Iterable[int]) -> Iterator[tuple[int, bytes]]:
    with opened(path, DataError) as file:
        for number in numbers:
            file.seek(number * BLOCK_BYTES)
            yield number, file.read(BLOCK_BYTES)


def spread(count: int, most: int) -> list[int]:
    """At most ``most`` of the numbers below ``count``, with the first and the last."""
    if count <= most:
        return list(range(count))
    return [(count - 1) * number // (most - 1) for number in range(most)]


def corpora_of(cfg: RunConfig, mode: str) -> list[TokenStore]:
    """All corpora of one mode."""
    return [corpus for group in open_corpora(cfg, mode) for corpus in group]


def tokenizer(case: Case) -> Iterator[Row]:
    """Load the tokenizer, and compare its ids and those of the corpora with the model's vocabulary."""
    try:
        loaded = load_tokenizer(case.cfg)
        lines = token_id_lines(case.cfg)
    except (UserError, OSError) as error:
        is_denied = _cure(error) == _DENIED_CURE
        yield fail(
            "tokenizer",
            str(error),
            _DENIED_CURE
            if is_denied
            else "correct what the message names, or copy it from a machine where it is complete",
        )
        return
    if loaded is None and not lines:
        yield skipped("tokenizer", "the configuration has none (Data.tokenizer)")
        return
    yield ok("tokenizer", "; ".join(lines))


def checkpoints(case: Case) -> Iterator[Row]:
    """The checkpoints that the run starts from: marker, manifest, sizes and headers."""
    refuse_foreign(case.cfg)
    named = list(weight_sources(case.cfg))
    if not named:
        yield skipped("checkpoints", "the run starts from none")
    for key, place in named:
        try:
            yield ok(key, str(resolve_checkpoint(place, verify=False)))
        except (UserError, OSError) as error:
            yield fail(key, str(error), _cure(error))


def fingerprints(case: Case) -> dict[str, str]:
    """Hashes of this node's data and tokenizer, by name."""
    if case.cfg is None:
        return {}
    found: dict[str, str] = {}
    for mode, _, cfg in _sets(case.cfg):
        found |= _of_set(cfg, mode)
    try:
        loaded = load_tokenizer(case.cfg)
    except (UserError, OSError):
        found["tokenizer"] = "not readable"
    else:
        found |= {} if loaded is None else {"tokenizer": loaded.fingerprint[:16]}
    return found


def _of_set(cfg: RunConfig, mode: str) -> dict[str, str]:
    try:
        if not getattr(cfg.Data, mode).dataset.is_corpus:
            return {f"Data.{mode}": build_dataset(cfg, mode).fingerprint}
        return {corpus.prefix: _of_corpus(corpus) for corpus in corpora_of(cfg, mode)}
    except (UserError, OSError):
        return {f"Data.{mode}": "not readable"}


def _of_corpus(corpus: TokenStore) -> str:
    text, path = corpus.fingerprint[:16], checksums_path(corpus.prefix)
    if path.is_file():
        return f"{text}, checksums {_digest(path)}"
    data = Path(f"{corpus.prefix}.bin")
    count = -(-data.stat().st_size // BLOCK_BYTES)
    found = hashlib.sha256()
    for _, block in _blocks(data, spread(count, _BLOCKS_COMPARED)):
        found.update(block)
    return f"{text}, no checksums, {found.hexdigest()[:16]}"


def starts(case: Case) -> dict[str, str]:
    """The checkpoints that the run starts from, by key: step and a hash of the manifest."""
    if case.cfg is None:
        return {}
    options = case.cfg.Engine.save_load
    named = list(weight_sources(case.cfg))
    if options.resume:
        named.append(("Engine.save_load.output_dir", options.output_dir))
    return {key: _of_checkpoint(Path(place)) for key, place in named}


def _of_checkpoint(place: Path) -> str:
    try:
        found = resolve_checkpoint(place, verify=False)
        manifest = found / MANIFEST_FILE
        return f"{found.name} {_digest(manifest)}" if manifest.is_file() else found.name
    except (UserError, OSError):
        return "no checkpoint that can be read"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]
