"""Checks of ``ppfleetx doctor`` on a run's files: corpora, tokenizer, checkpoints, output directory."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ppfleetx.checkpoint.manifest import MANIFEST_FILE
from ppfleetx.checkpoint.resolve_checkpoint import resolve_checkpoint
from ppfleetx.config.errors import DataError, UserError
from ppfleetx.config.message_text import bytes_text, counted
from ppfleetx.config.sections.data import MODES
from ppfleetx.config.sections.root import RunConfig, data_sets
from ppfleetx.conversion.detect import refuse_foreign
from ppfleetx.core.engine.check_output_dir import output_dir_of
from ppfleetx.data.build import build_dataset, load_tokenizer, open_corpora
from ppfleetx.data.checksums import BLOCK_BYTES, Block, CorpusChecksums, checksums_path, read_checksums
from ppfleetx.data.corpus_checks import token_id_lines
from ppfleetx.data.gpt_dataset import split_ranges
from ppfleetx.data.indexed_dataset import TokenStore
from ppfleetx.doctor.results import Row, Target, fail, ok, skipped, warn
from ppfleetx.planner.prediction import run_prediction
from ppfleetx.planner.run_cost import checkpoint_bytes
from ppfleetx.utils.input_files import opened

_FIX = (
    "mount or copy intact files to this machine (ppfleetx prepare writes a corpus), let this user read them "
    "(chmod a+r), or correct the path, which is the same for all machines"
)
_BLOCKS, _BLOCKS_COMPARED = 256, 64
"""Maximum numbers of evenly spaced 1 MiB blocks to read from a file. The first is for comparing the file with
its checksums, the second for comparing the machines of a job."""
_READ_SECONDS = 30.0  # time limit for comparing all corpora of one data set with their checksums
_MODES = ("Train", "Eval")


def data(target: Target) -> Iterator[Row]:
    """Check that the data of ``Data.Train`` and ``Data.Eval`` can be opened and are enough for one sample. If
    a corpus has checksums, its blocks are compared with them. Only some blocks are compared if the corpus is
    large or the disk is slow."""
    found, unguarded = False, list[str]()
    for mode, name, cfg in _sets(target.cfg):
        found = True
        title = f"Data.{mode}" if name is None else f"Data.{mode} {name}"
        try:
            texts = list(_look(cfg, mode, unguarded))
        except (UserError, OSError) as error:
            yield fail(title, str(error), _FIX)
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


def _sets(cfg: RunConfig) -> Iterator[tuple[str, str | None, RunConfig]]:
    for mode in _MODES:
        for name, one in data_sets(cfg, mode).items():
            yield mode, name, one


def _look(cfg: RunConfig, mode: str, unguarded: list[str]) -> Iterator[str]:
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
            kept = f", {_compare_with_checksums(sums, end)} as in {checksums_path(corpus.prefix).name}"
        ends = corpus.flat(0, 1).sum() + corpus.flat(corpus.num_tokens - 1, corpus.num_tokens).sum()
        assert ends >= 0
        yield f"{corpus.prefix}: {corpus.num_tokens:,} tokens in {len(corpus):,} sequences{kept}"


def _has_a_sample(corpora: Sequence[TokenStore], cfg: RunConfig, mode: str) -> None:
    options = getattr(cfg.Data, mode).dataset
    ranges = [split_ranges(len(corpus), options.split)[MODES.index(mode)] for corpus in corpora]
    most = max(int(one.sizes[first:last].sum()) for one, (first, last) in zip(corpora, ranges, strict=True))
    if most <= options.max_seq_len:
        raise DataError(
            f"{corpora[0].prefix}: the {mode} split has {counted(most, 'token', ',')}, and one sample needs "
            f"{options.max_seq_len + 1:,}. Give {mode} a larger share of `split`, more text, or a shorter "
            "max_seq_len"
        )


def _compare_with_checksums(sums: CorpusChecksums, end: float) -> str:
    """Compare a corpus with its checksums. The comparison stops at the time ``end`` (``time.monotonic``).
    Returns a phrase that says how much was compared. Raises DataError if a block is damaged."""
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
    """Return at most ``most`` indices into a list of ``count`` items, evenly spaced from the first to the
    last."""
    if count <= most:
        return list(range(count))
    return [(count - 1) * number // (most - 1) for number in range(most)]


def corpora_of(cfg: RunConfig, mode: str) -> list[TokenStore]:
    return [corpus for group in open_corpora(cfg, mode) for corpus in group]


def tokenizer(target: Target) -> Iterator[Row]:
    try:
        loaded = load_tokenizer(target.cfg)
        lines = token_id_lines(target.cfg)
    except (UserError, OSError) as error:
        yield fail("tokenizer", str(error), "correct what the message names, or copy it from another machine")
        return
    if loaded is None and not lines:
        yield skipped("tokenizer", "the configuration has none (Data.tokenizer)")
        return
    yield ok("tokenizer", "; ".join(lines))


def checkpoints(target: Target) -> Iterator[Row]:
    """Check that each checkpoint that the run starts from is complete, and that the sizes and headers of its
    files match its manifest."""
    refuse_foreign(target.cfg)
    named = list(target.cfg.weight_sources())
    if not named:
        yield skipped("checkpoints", "the run starts from none")
    for key, place in named:
        try:
            yield ok(key, str(resolve_checkpoint(place, verify=False)))
        except (UserError, OSError) as error:
            yield fail(key, str(error), _FIX)


def fingerprints(target: Target) -> dict[str, str]:
    """Return hashes of the training data, the evaluation data and the tokenizer, by name. The hashes of all
    machines must be equal. Data that cannot be read have the value "not readable" instead of a hash."""
    if target.cfg is None:
        return {}
    found: dict[str, str] = {}
    for mode, _, cfg in _sets(target.cfg):
        found |= _of_set(cfg, mode)
    try:
        loaded = load_tokenizer(target.cfg)
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


def starts(target: Target) -> dict[str, str]:
    """Return a description of each checkpoint that the run can start from, by configuration key. The
    descriptions of all machines must be equal. With ``Engine.save_load.resume``, ``output_dir`` is one of the
    keys.

    A description is the checkpoint's name and the first 16 hexadecimal digits of its manifest's SHA-256.
    Checkpoints of PaddleFleetX have no manifest, so theirs is only the name. If a checkpoint is missing or
    cannot be read, the description says so.
    """
    if target.cfg is None:
        return {}
    options = target.cfg.Engine.save_load
    named = list(target.cfg.weight_sources())
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


_PIECE_BYTES, _PIECES = 4 << 20, 8
_SLOW_SECONDS = 120.0  # seconds to write one checkpoint


def output_directory(target: Target) -> Iterator[Row]:
    """Check whether the output directory can be written, and measure the write speed. If the directory does
    not exist, its nearest existing parent is checked instead."""
    directory = output_dir_of(target.cfg)
    place = nearest_directory(directory)
    title = "output directory"
    if not place.is_dir():
        yield fail(title, f"{place} is a file", "give another one: -o Engine.save_load.output_dir=DIR")
        return
    where = str(directory) if place == directory else f"{directory} (to be created in {place})"
    try:
        speed = write_speed(place)
    except OSError as error:
        fix = "free some, mount it for writing, let this user write there, or give another "
        fix += "-o Engine.save_load.output_dir=DIR"
        yield fail(title, f"{where} cannot be written: {error.strerror}", fix)
        return
    needed = one_checkpoint(target.cfg)
    seconds = "" if needed is None else f"; a checkpoint of {bytes_text(needed)} takes {needed / speed:.1f} s"
    text = f"{where} is written at {bytes_text(speed)}/s by one process{seconds}"
    if needed is not None and needed / speed > _SLOW_SECONDS:
        fix = "a faster file system, or Engine.save_load.async_save if it is off, and fewer checkpoints"
        yield warn(title, text, fix, bytes_per_second=speed)
    else:
        yield ok(title, text, bytes_per_second=speed)


def room(target: Target) -> Iterator[Row]:
    needed = one_checkpoint(target.cfg)
    if needed is None:
        yield skipped("room", "the size of a checkpoint is only known for training our own GPT")
        return
    place = nearest_directory(output_dir_of(target.cfg))
    yield room_row(shutil.disk_usage(place).free, needed, checkpoints_at_once(target.cfg), place)


def room_row(free: float, each: float, count: int, place: Path) -> Row:
    """Return the report row that says whether the checkpoints of a run fit into the directory ``place``.

    Args:
        free: the free space in bytes.
        each: the size of a checkpoint in bytes.
        count: the number of checkpoints that exist at the same time.
        place: the directory.
    """
    numbers = {"free_bytes": free, "needed_bytes": each * count}
    text = f"{bytes_text(free)} free in {place}; {counted(count, 'checkpoint')} of {bytes_text(each)}"
    if free < each:
        fix = "free some, or give another -o Engine.save_load.output_dir=DIR"
        return fail("room", f"{text}: not one fits", fix, **numbers)
    if free < each * count:
        text += f": {int(free // each)} fit"
        return warn("room", text, "-o Engine.save_load.keep_max=N deletes the oldest", **numbers)
    return ok("room", text, **numbers)


def nearest_directory(directory: Path) -> Path:
    place = directory.absolute()
    while not os.path.lexists(place) and place != place.parent:
        place = place.parent
    return directory if place == directory.absolute() else place


def write_speed(directory: Path) -> float:
    """Measure the speed, in bytes per second, at which one process writes a file in ``directory`` to the
    disk. Raises OSError if the file cannot be written."""
    piece = os.urandom(_PIECE_BYTES)
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        begin = time.perf_counter()
        for _ in range(_PIECES):
            view = memoryview(piece)
            while view:
                view = view[os.write(file.fileno(), view) :]
        os.fsync(file.fileno())
        return _PIECES * _PIECE_BYTES / (time.perf_counter() - begin)


def one_checkpoint(cfg: RunConfig) -> float | None:
    """Return the predicted size of one checkpoint in bytes; None if the planner cannot predict it."""
    prediction = run_prediction(cfg, cfg.Global.device)
    return None if prediction is None else checkpoint_bytes(prediction.job)


def checkpoints_at_once(cfg: RunConfig) -> int:
    """Return the maximum number of checkpoints that the run has on disk at the same time."""
    options = cfg.Engine.save_load
    every = options.save_steps or cfg.Engine.max_steps
    written = -(-cfg.Engine.max_steps // every)
    # The oldest checkpoint is deleted only after a new one is written.
    return written if options.keep_max is None else min(written, options.keep_max + 1)
