"""Encode a text corpus to a token corpus with several processes. Documents keep their order, and the memory
needed does not depend on the size of the corpus."""

from __future__ import annotations

import contextlib
import glob
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ppfleetx.config.errors import DataError
from ppfleetx.config.message_text import counted
from ppfleetx.data.indexed_dataset import (
    IndexedDatasetWriter,
    bin_path,
    idx_path,
    optimal_dtype,
    refuse_to_replace,
)
from ppfleetx.data.prepare.corpus_reader import (
    MOST_SKIPPED,
    Chunk,
    Source,
    documents_of,
    read_chunks,
    why_without_text,
)
from ppfleetx.data.text_files import MAX_DOCUMENT_BYTES, load_line
from ppfleetx.data.tokenizer.tokenizer import Tokenizer
from ppfleetx.utils.end_processes import process_exists
from ppfleetx.utils.progress_bar import ProgressBar

_PLACES_KEPT = 5  # positions kept for each kind of problem; all problems are counted
_UNITS = {"json": "line", "line": "line", "paragraph": "paragraph"}


@dataclass
class ChunkResult:
    """What a worker process returns for one chunk of the corpus.

    Attributes:
        arrays: for each key (field of the JSON documents), the tokens of all documents in the output's dtype,
            and the number of tokens of each document, int32.
        num_seen: number of documents in the chunk, including skipped ones.
        skipped: number of skipped documents, by kind of problem.
        places: positions of the first skipped documents, by kind of problem.
    """

    arrays: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    num_documents: int = 0
    num_text_bytes: int = 0
    num_seen: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    places: dict[str, list[int]] = field(default_factory=dict)

    def skip(self, problem: str) -> None:
        self.skipped[problem] += 1
        places = self.places.setdefault(problem, [])
        if len(places) < _PLACES_KEPT:
            places.append(self.num_seen)


class _Skip(Exception):  # noqa: N818 - control flow within this file
    """Raised in a worker to skip a document. The message is the kind of problem, such as "not UTF-8"."""


class ChunkEncoder:
    """Encodes the fields ``keys`` of all documents in a chunk. Worker processes call an instance for each
    chunk. With ``append_eod``, an end-of-document token is added after each nonempty text."""

    def __init__(
        self, tokenizer: Tokenizer, keys: tuple[str, ...], append_eod: bool, dtype: np.dtype
    ) -> None:
        self._tokenizer, self._keys, self.dtype = tokenizer, keys, dtype
        self._eod = np.array([tokenizer.eod_id], dtype) if append_eod else None

    def __call__(self, chunk: Chunk) -> ChunkResult:
        result = ChunkResult()
        parts: dict[str, list[np.ndarray]] = {key: [] for key in self._keys}
        lengths: dict[str, list[int]] = {key: [] for key in self._keys}
        for document in documents_of(chunk):
            if document == b"":  # shortcut: a file may consist of empty lines only
                result.skip("empty")
                result.num_seen += 1
                continue
            try:
                if document is None:
                    raise _Skip(f"longer than {chunk.max_document_bytes / 1e6:g} MB (--max-document-mb)")
                texts = self._texts(document, is_json=chunk.kind == "json")
                encoded = [self._encode(text) for text in texts]
            except _Skip as problem:
                result.skip(str(problem))
            else:
                for key, ids in zip(self._keys, encoded, strict=True):
                    has_end = self._eod is not None and len(ids) > 0
                    parts[key] += [ids, self._eod] if has_end else [ids]
                    lengths[key].append(len(ids) + has_end)
                result.num_documents += 1
                result.num_text_bytes += sum(map(_num_bytes, texts))
            result.num_seen += 1
        for key in self._keys:
            flat = np.concatenate(parts[key]) if parts[key] else np.empty(0)
            result.arrays[key] = flat.astype(self.dtype), np.array(lengths[key], np.int32)
        return result

    def _texts(self, document: bytes, is_json: bool) -> list[str]:
        try:
            texts = _json_texts(document, self._keys) if is_json else [document.decode("utf-8")]
        except UnicodeDecodeError:
            raise _Skip("not UTF-8") from None
        if not any(texts):
            raise _Skip("empty")
        return texts

    def _encode(self, text: str) -> np.ndarray:
        try:
            return self._tokenizer.encode_to_numpy(text)
        except DataError:
            raise _Skip("holds half a surrogate pair") from None


def _json_texts(line: bytes, keys: tuple[str, ...]) -> list[str]:
    if not line or line.isspace():
        raise _Skip("empty")
    try:
        record = load_line(line)
    except ValueError as error:
        raise _Skip("not UTF-8" if isinstance(error, UnicodeDecodeError) else "not JSON") from None
    if not isinstance(record, dict):
        raise _Skip("not a JSON object")
    texts = []
    for key in keys:
        if key not in record:
            raise _Skip(f"no key {key!r}")
        if not isinstance(record[key], str):
            raise _Skip(f"the value of {key!r} is not a string")
        texts.append(record[key])
    return texts


def _num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8"))


class Problems:
    """Counts the skipped documents by kind of problem, and remembers where the first few of each kind are."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.places: dict[str, list[str]] = {}
        self._path: Path | None = None
        self._num_seen = 0  # documents seen in this file

    def add(self, chunk: Chunk, result: ChunkResult, strict: bool) -> None:
        """Count the skipped documents of the next chunk of the corpus, and remember where they are. Raises
        DataError if ``strict`` is set and a document was skipped."""
        if self._path != chunk.paths[0]:
            self._path, self._num_seen = chunk.paths[0], 0
        self.counts += result.skipped
        for problem, positions in result.places.items():
            places = self.places.setdefault(problem, [])
            found = [self._place(chunk, position) for position in positions]
            if strict:
                raise DataError(f"{found[0]}: {problem}")
            places += found[: _PLACES_KEPT - len(places)]
        self._num_seen += result.num_seen

    def _place(self, chunk: Chunk, position: int) -> str:
        if chunk.kind == "file":
            return str(chunk.paths[position])
        return f"{chunk.paths[0]}, {_UNITS[chunk.kind]} {self._num_seen + position + 1}"

    def lines(self) -> list[str]:
        """Describe the skipped documents: one line per kind of problem, the most frequent kind first."""
        lines = []
        for problem, count in self.counts.most_common():
            more = ["..."] if count > _PLACES_KEPT else []
            lines.append(f"{count:,} {problem} ({'; '.join(self.places[problem] + more)})")
        return lines


_IN_FLIGHT_PER_WORKER = 3

_function: Callable[[Any], Any] | None = None  # set in each worker by _start_worker


@contextlib.contextmanager
def map_in_order(
    function: Callable[[Any], Any], items: Iterable[Any], workers: int
) -> Iterator[Iterator[tuple[Any, Any]]]:
    """Context manager that applies ``function`` to all ``items`` in worker processes, or with ``workers=1``
    in this process. Yields one iterator over ``(item, function(item))`` in the order of ``items``. The
    iterator raises DataError if a worker dies."""
    if workers == 1:
        yield ((item, function(item)) for item in items)
        return
    # Forking is fast and needs no pickling, but it is missing or unsafe on systems other than Linux.
    method = "fork" if sys.platform == "linux" else "spawn"
    pool = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context(method),
        initializer=_start_worker,
        initargs=(function, os.getpid()),
    )
    try:
        pool.submit(int)  # start the workers now, before the caller starts threads
        yield _results(pool, items, workers)
    finally:
        # Wait only for the items in progress, which are small, and cancel the rest.
        pool.shutdown(wait=True, cancel_futures=True)


def _results(pool: ProcessPoolExecutor, items: Iterable[Any], workers: int) -> Iterator[tuple[Any, Any]]:
    waiting: deque[tuple[Any, Any]] = deque()
    try:
        for item in items:
            waiting.append((item, pool.submit(_work, item)))
            if len(waiting) >= _IN_FLIGHT_PER_WORKER * workers:
                first, future = waiting.popleft()
                yield first, future.result()
        while waiting:
            first, future = waiting.popleft()
            yield first, future.result()
    except BrokenProcessPool as error:
        raise DataError(
            "a worker process died: it was killed, or memory ran out (fewer workers need less)"
        ) from error


def _start_worker(function: Callable[[Any], Any], parent: int) -> None:
    global _function
    _function = function
    # Ctrl-C reaches the whole process group, but only the parent handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Without this thread, a worker would wait for work forever if the parent is killed.
    threading.Thread(target=_exit_with_parent, args=(parent,), daemon=True).start()


def _exit_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _work(item: Any) -> Any:
    assert _function is not None
    return _function(item)


@dataclass
class Report:
    """The result of `preprocess`.

    Attributes:
        num_tokens: number of tokens in all outputs, including end-of-document tokens.
        num_text_bytes: length of the texts in UTF-8.
        seconds, cpu_seconds: wall-clock time, and CPU time of all processes.
        outputs: the written corpora, as paths without suffix.
    """

    num_documents: int = 0
    num_tokens: int = 0
    num_text_bytes: int = 0
    problems: Problems = field(default_factory=Problems)
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    outputs: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        mb = self.num_text_bytes / 1e6
        lines = [
            f"{counted(self.num_documents, 'document', ',')}, {counted(self.num_tokens, 'token', ',')} from "
            f"{mb:,.1f} MB of text ({self.num_text_bytes / max(1, self.num_tokens):.2f} bytes per token)",
            f"{self.seconds:.1f} s, {mb / self.seconds:.1f} MB/s; "
            f"{self.cpu_seconds:.1f} s of processor time, {mb / self.cpu_seconds:.1f} MB/s per core",
        ]
        lines += [f"left out: {line}" for line in self.problems.lines()]
        lines += [f"wrote {bin_path(prefix)} and {idx_path(prefix)}" for prefix in self.outputs]
        return "\n".join(lines)


def output_prefixes(output_prefix: str | os.PathLike[str], keys: Sequence[str]) -> dict[str, str]:
    """Return {key: path of the output corpus, without suffix} for ``keys``, the fields of the JSON documents.
    Paths are named as in Megatron-LM: ``{output_prefix}_{key}_document``."""
    return {key: f"{os.fspath(output_prefix)}_{key}_document" for key in keys}


def preprocess(
    sources: Sequence[Source],
    output_prefix: str | os.PathLike[str],
    tokenizer: Tokenizer,
    *,
    keys: Sequence[str] = ("text",),
    append_eod: bool = False,
    workers: int = 1,
    strict: bool = False,
    overwrite: bool = False,
    max_document_bytes: int = MAX_DOCUMENT_BYTES,
    show_progress: bool | Literal["auto"] = "auto",
) -> Report:
    """Encode a text corpus to token corpora ``{output_prefix}_{key}_document.{bin,idx}``, one for each of
    ``keys``, the fields of the JSON documents. With plain text, ``keys`` must have exactly one entry, used
    for the output's name.

    A document is skipped and reported if it is empty or damaged, has no string for one of ``keys``, or is
    longer than ``max_document_bytes``. With ``strict``, such a document is an error. The size limit does not
    apply to an uncompressed file that is one document. If encoding fails, no new files are left. Raises
    DataError if the input is bad or has no documents, if an output exists and ``overwrite`` is False, or if a
    worker dies.
    """
    outputs = output_prefixes(output_prefix, keys)
    _check_keys(sources, keys)
    _prepare_outputs(outputs.values(), overwrite)
    began, cpu_began = time.perf_counter(), _cpu_seconds()
    encoder = ChunkEncoder(tokenizer, tuple(keys), append_eod, optimal_dtype(tokenizer.vocab_size))
    report = Report(outputs=list(outputs.values()))
    try:
        chunks = read_chunks(sources, max_document_bytes=max_document_bytes)
        _encode_all(sources, chunks, encoder, outputs, workers, strict, show_progress, report)
    except OSError as error:  # read errors are DataErrors, so this is a write error
        raise DataError(f"cannot write {os.fspath(output_prefix)}: {error}") from error
    report.seconds = time.perf_counter() - began
    report.cpu_seconds = _cpu_seconds() - cpu_began
    return report


def _encode_all(
    sources: Sequence[Source],
    chunks: Iterable[Chunk],
    encoder: ChunkEncoder,
    outputs: dict[str, str],
    workers: int,
    strict: bool,
    show_progress: bool | Literal["auto"],
    report: Report,
) -> None:
    total = sum(source.num_bytes for source in sources)
    with ExitStack() as stack:
        # Enter this first: workers must be forked before the progress bar starts its thread.
        results = stack.enter_context(map_in_order(encoder, chunks, workers))
        writers = {
            key: stack.enter_context(IndexedDatasetWriter(prefix, encoder.dtype))
            for key, prefix in outputs.items()
        }
        bar = stack.enter_context(ProgressBar("encoding", total=total / 1e6, unit="MB", show=show_progress))
        for chunk, result in results:
            report.problems.add(chunk, result, strict)
            for key, (tokens, lengths) in result.arrays.items():
                writers[key].add_documents(tokens, lengths)
            report.num_documents += result.num_documents
            report.num_text_bytes += result.num_text_bytes
            bar.advance(chunk.num_disk_bytes / 1e6, counted(report.num_documents, "document", ","))
            if not report.num_documents and report.problems.counts.total() > MOST_SKIPPED:
                break
        if report.num_documents == 0:
            lines = ["there is no document to write", *report.problems.lines(), why_without_text(sources)]
            raise DataError("\n".join(filter(None, lines)))
        report.num_tokens = sum(writer.num_tokens for writer in writers.values())


def _check_keys(sources: Sequence[Source], keys: Sequence[str]) -> None:
    if not keys or len(set(keys)) != len(keys):
        raise DataError(f"json keys must be given, each once; got {', '.join(keys) or 'none'}")
    plain = next((source for source in sources if source.kind != "json"), None)
    if plain is not None and len(keys) > 1:
        raise DataError(f"{plain.path} is plain text and has no keys {', '.join(keys)}; give one key")


def _prepare_outputs(prefixes: Iterable[str], overwrite: bool) -> None:
    for prefix in prefixes:
        _remove_leftovers(bin_path(prefix))
        refuse_to_replace(prefix, overwrite)


def _remove_leftovers(path: Path) -> None:
    for leftover in path.parent.glob(f"{glob.escape(path.name)}.*.tmp"):
        process = leftover.name.split(".")[-2]
        if process.isdigit() and not process_exists(int(process)):
            leftover.unlink(missing_ok=True)


def _cpu_seconds() -> float:
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
