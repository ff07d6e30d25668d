"""Encode text corpora to token files in several processes, in order, with memory independent of corpus
size."""

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
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ppfleetx.config.counts import counted
from ppfleetx.config.errors import DataError
from ppfleetx.data.indexed import IndexedDatasetWriter, bin_path, idx_path, optimal_dtype, refuse_to_replace
from ppfleetx.data.prepare.corpus import Chunk, Source, read_chunks
from ppfleetx.data.prepare.encode_chunk import ChunkEncoder, Problems
from ppfleetx.data.text_files import MAX_LINE_BYTES
from ppfleetx.data.tokenizer.tokenizer import Tokenizer
from ppfleetx.utils.processes import process_exists
from ppfleetx.utils.progress import ProgressBar

_IN_FLIGHT_PER_WORKER = 3

_function: Callable[[Any], Any] | None = None  # set in the workers


@contextlib.contextmanager
def map_in_order(
    function: Callable[[Any], Any], items: Iterable[Any], workers: int
) -> Iterator[Iterator[tuple[Any, Any]]]:
    """Yield ``(item, function(item))`` for each item, in order. ``workers=1`` runs in this process.

    The function is sent to each worker once. Workers end when the block is left or this process is killed. If
    a worker dies, the iterator raises DataError.
    """
    if workers == 1:
        yield ((item, function(item)) for item in items)
        return
    # A fork costs nothing and needs no pickling; on other systems it is unsafe or unavailable.
    method = "fork" if sys.platform == "linux" else "spawn"
    pool = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context(method),
        initializer=_start_worker,
        initargs=(function, os.getpid()),
    )
    try:
        pool.submit(int)  # starts the workers now, before the caller starts threads
        yield _results(pool, items, workers)
    finally:
        # Wait for the items in progress, which are small; items not yet begun are dropped.
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
    # Ctrl-C reaches the whole process group; the parent alone decides what to do about it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    """End this process when its parent ends; otherwise a worker of a pool would wait forever."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _work(item: Any) -> Any:
    assert _function is not None
    return _function(item)


@dataclass
class Report:
    """The outcome of a run: documents (of each key), tokens with end-of-document tokens, UTF-8 bytes of the
    texts, the documents left out, wall-clock and processor time, and the prefixes of the pairs written."""

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
    """The output prefix for each key, named as in Megatron."""
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
    max_document_bytes: int = MAX_LINE_BYTES,
    show_progress: bool | Literal["auto"] = "auto",
) -> Report:
    """Encode a corpus into ``{output_prefix}_{key}_document.{bin,idx}``.

    Documents keep the order of the input. Documents that are empty or not text are left out, counted and
    reported. The files appear when everything is written; a run that fails or is interrupted leaves nothing.

    Args:
        keys: the keys of the json objects to encode, each to its own pair. Plain text has the key "text".
        append_eod: whether to write the end-of-document token after each document.
        strict: whether a document that would be left out is an error.
        max_document_bytes: the size of the longest document; longer ones are left out.
        show_progress: True, False, or "auto" for terminals only.

    Raises:
        DataError: wrong input, existing output, no document at all, or a worker that died.
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
    except OSError as error:  # read errors are DataErrors already
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
        # This is outermost, so that the workers are forked before the progress bar starts its thread.
        results = stack.enter_context(map_in_order(encoder, chunks, workers))
        writers = {
            key: stack.enter_context(IndexedDatasetWriter(prefix, encoder.dtype))
            for key, prefix in outputs.items()
        }
        bar = stack.enter_context(ProgressBar("encoding", total=total / 1e6, unit="MB", show=show_progress))
        for chunk, result in results:
            report.problems.add(chunk, result, strict)
            for key, (tokens, lengths) in result.arrays(encoder.dtype).items():
                writers[key].add_documents(tokens, lengths)
            report.num_documents += result.num_documents
            report.num_text_bytes += result.num_text_bytes
            bar.advance(chunk.num_disk_bytes / 1e6, counted(report.num_documents, "document", ","))
        if report.num_documents == 0:
            raise DataError("\n".join(["there is no document to write", *report.problems.lines()]))
        report.num_tokens = sum(writer.num_tokens for writer in writers.values())


def _check_keys(sources: Sequence[Source], keys: Sequence[str]) -> None:
    if not keys or len(set(keys)) != len(keys):
        raise DataError(f"json keys must be given, each once; got {', '.join(keys) or 'none'}")
    plain = next((source for source in sources if source.kind != "json"), None)
    if plain is not None and len(keys) > 1:
        raise DataError(f"{plain.path} is plain text and has no keys {', '.join(keys)}; give one key")


def _prepare_outputs(prefixes: Iterable[str], overwrite: bool) -> None:
    """Refuse to replace a finished pair, and remove files that killed runs left behind."""
    for prefix in prefixes:
        for path in (bin_path(prefix), idx_path(prefix)):
            _remove_leftovers(path)
        refuse_to_replace(prefix, overwrite)


def _remove_leftovers(path: Path) -> None:
    for leftover in path.parent.glob(f"{glob.escape(path.name)}.*.tmp"):
        process = leftover.name.split(".")[-2]
        if process.isdigit() and not process_exists(int(process)):
            leftover.unlink(missing_ok=True)


def _cpu_seconds() -> float:
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
