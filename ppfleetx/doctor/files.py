"""Corpora, tokenizer and checkpoints that the configuration names: there, readable, and the right ones."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from ppfleetx.checkpoint.directory import resolve_checkpoint
from ppfleetx.config.data_sets import data_sets
from ppfleetx.config.errors import UserError
from ppfleetx.config.sections.root import RunConfig
from ppfleetx.core.programs.sources import refuse_foreign, sources
from ppfleetx.core.programs.token_ids import token_id_lines
from ppfleetx.data.build import build_dataset, load_tokenizer, open_corpora
from ppfleetx.data.checksums import checksums_path, read_checksums
from ppfleetx.data.token_store import TokenStore
from ppfleetx.doctor.case import Case
from ppfleetx.doctor.rows import Row, fail, ok, skipped, warn

_CURE = "mount or copy the files to this machine, or say where they are: one path for all machines"
_MODES = ("Train", "Eval")


def data(case: Case) -> Iterator[Row]:
    """Every corpus and file of texts of ``Data.Train`` and ``Data.Eval``: opened, and both ends read."""
    found = False
    for mode, name, cfg in _sets(case.cfg):
        found = True
        title = f"Data.{mode}" if name is None else f"Data.{mode} {name}"
        try:
            texts = list(_look(cfg, mode))
        except (UserError, OSError) as error:
            yield fail(title, str(error), _CURE)
            continue
        yield ok(title, "; ".join(texts))
    if not found:
        yield skipped("data", "the configuration has neither Data.Train nor Data.Eval")


def _sets(cfg: RunConfig) -> Iterator[tuple[str, str | None, RunConfig]]:
    for mode in _MODES:
        for name, one in data_sets(cfg, mode).items():
            yield mode, name, one


def _look(cfg: RunConfig, mode: str) -> Iterator[str]:
    if not getattr(cfg.Data, mode).dataset.is_corpus:
        yield f"{len(build_dataset(cfg, mode)):,} examples"
        return
    for corpus in corpora_of(cfg, mode):
        sums = read_checksums(corpus.prefix)
        if sums is not None:
            sums.check_sizes()
        ends = corpus.flat(0, 1).sum() + corpus.flat(corpus.num_tokens - 1, corpus.num_tokens).sum()
        assert ends >= 0
        kept = "" if sums is None else f", sizes as in {checksums_path(corpus.prefix).name}"
        yield f"{corpus.prefix}: {corpus.num_tokens:,} tokens in {len(corpus):,} sequences{kept}"


def corpora_of(cfg: RunConfig, mode: str) -> list[TokenStore]:
    """All corpora of one mode."""
    return [corpus for group in open_corpora(cfg, mode) for corpus in group]


def tokenizer(case: Case) -> Iterator[Row]:
    """The tokenizer, and the ids of tokenizer and corpora against the model's vocabulary."""
    try:
        loaded = load_tokenizer(case.cfg)
        lines = token_id_lines(case.cfg)
    except (UserError, OSError) as error:
        yield fail("tokenizer", str(error), "mend what the message names, on every machine")
        return
    if loaded is None and not lines:
        yield skipped("tokenizer", "the configuration names none (Data.tokenizer)")
        return
    yield ok("tokenizer", "; ".join(lines))


def checkpoints(case: Case) -> Iterator[Row]:
    """The checkpoints a run would start from: marker, manifest, sizes and headers."""
    refuse_foreign(case.cfg)
    named = list(sources(case.cfg))
    if not named:
        yield skipped("checkpoints", "the run starts from none")
    for key, place in named:
        try:
            yield ok(key, str(resolve_checkpoint(place, verify=False)))
        except (UserError, OSError) as error:
            yield fail(key, str(error), _CURE)


def fingerprints(case: Case) -> dict[str, str]:
    """What tells this node's data and tokenizer from another's: hashes by name, the reason where there is
    none. Of a corpus: its lengths, and a few blocks; of checksums beside it, all of their file."""
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
    return f"{text}, checksums {_digest(path)}" if path.is_file() else f"{text}, no checksums"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def note_of_checksums(case: Case) -> Iterator[Row]:
    """Corpora that no checksum guards."""
    unguarded = []
    for mode, _, cfg in _sets(case.cfg):
        try:
            if getattr(cfg.Data, mode).dataset.is_corpus:
                unguarded += [
                    c.prefix for c in corpora_of(cfg, mode) if not checksums_path(c.prefix).exists()
                ]
        except (UserError, OSError):
            continue  # the check of the data says why
    if unguarded:
        names = ", ".join(dict.fromkeys(unguarded))
        yield warn(
            "checksums",
            f"none beside {names}: a token that changes on disk would not be noticed",
            "ppfleetx inspect-data PREFIX --write-checksums writes them",
        )
