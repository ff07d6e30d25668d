"""Time and memory of the index maps of a large corpus.

``python benchmarks/index_maps.py --documents 10000000`` writes a corpus of random lengths (its tokens are a
hole in the file) to a temporary directory, builds the maps of a run over it, loads them again from the cache
and reads samples anywhere in it. One JSON line per stage, with seconds and the process's peak memory so far.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness  # noqa: F401 - the project can be imported
import numpy as np

from ppfleetx.data.blended import blending_indices
from ppfleetx.data.gpt_dataset import GPTDataset, SampleOptions
from ppfleetx.data.indexed_dataset import HEADER, MAGIC, VERSION, IndexedDataset, bin_path, idx_path


def write_corpus(prefix: Path, num_documents: int, mean_length: int) -> None:
    """A pair with log-normal lengths whose .bin is one hole of the right size."""
    lengths = np.random.default_rng(0).lognormal(np.log(mean_length), 1.0, num_documents).astype("<i4")
    ends = np.cumsum(lengths, dtype="<i8") * 2
    with idx_path(prefix).open("wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, 8, num_documents, num_documents + 1))
        for array in (lengths, ends - lengths * 2, np.arange(num_documents + 1, dtype="<i8")):
            file.write(array.data)
    with bin_path(prefix).open("wb") as file:
        file.truncate(int(ends[-1]))


def timed(stage: str, work: Callable[[], Any], **numbers: Any) -> Any:
    started = time.perf_counter()
    result = work()
    seconds = round(time.perf_counter() - started, 2)
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(json.dumps({"stage": stage, "seconds": seconds, "peak_mb": peak_mb, **numbers}), flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=10_000_000)
    parser.add_argument("--mean-length", type=int, default=500)
    parser.add_argument("--sequence-length", type=int, default=1024)
    parser.add_argument("--epochs", type=float, default=1.0)
    parser.add_argument("--blend-samples", type=int, default=10_000_000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        prefix = Path(directory) / "corpus"
        write_corpus(prefix, args.documents, args.mean_length)
        corpus = timed("open", lambda: IndexedDataset(prefix))
        timed("fingerprint", lambda: corpus.fingerprint)
        options = SampleOptions(args.sequence_length)
        num_samples = int(args.epochs * corpus.num_tokens / args.sequence_length) - 1

        def build() -> GPTDataset:
            return GPTDataset(corpus, 0, len(corpus), options, num_samples=num_samples, seed=1234)

        dataset = timed("build maps and store them", build, samples=num_samples)
        timed("load them from the cache", build)
        order = np.random.default_rng(1).integers(0, len(dataset), 10000).tolist()
        timed("10000 samples", lambda: [dataset[index] for index in order])
    for num_corpora in (2, 8, 64):
        weights = np.random.default_rng(2).dirichlet(np.ones(num_corpora)).tolist()
        work = timed("blend", lambda w=weights: blending_indices(w, args.blend_samples), corpora=num_corpora)
        assert len(work[0]) == args.blend_samples


if __name__ == "__main__":
    main()
