"""Speed of preprocessing, and of the same work through ``tokenizers``: ``python benchmarks/preprocess.py``.

The corpus is the Python standard library's own sources (tests included, installed packages not), as json
lines and as a folder. Each pair of runs encodes all of it from files to ``.bin/.idx``: once with `preprocess`
in one process, once reading a document at a time and calling ``tokenizers.Tokenizer.encode`` on it, as a
worker of Megatron-LM's ``tools/preprocess_data.py`` does. Both must write the same bytes. Seconds are
processor time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

from harness import cpu_seconds

from ppfleetx.data.indexed_dataset import IndexedDatasetWriter, bin_path, idx_path, optimal_dtype
from ppfleetx.data.prepare.corpus_reader import find_sources, iterate_texts
from ppfleetx.data.prepare.preprocess import preprocess
from ppfleetx.data.tokenizer.tokenizer import Tokenizer, train_tokenizer


def write_corpus(directory: Path) -> dict[str, Path]:
    """The standard library as a folder and as json lines."""
    root = Path(sysconfig.get_paths()["stdlib"])
    folder, lines = directory / "folder", directory / "lines.jsonl"
    with lines.open("w", encoding="utf-8") as file:
        for path in sorted(root.rglob("*.py")):
            if "site-packages" in path.parts or "dist-packages" in path.parts:
                continue
            try:
                text = path.read_bytes().decode("utf-8")
            except UnicodeDecodeError:
                continue
            copy = folder / path.relative_to(root)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(text.encode("utf-8"))
            file.write(json.dumps({"text": text}) + "\n")
    return {"folder": folder, "jsonl": lines}


def documents(corpus: Path) -> Iterator[str]:
    """Texts one at a time, read in the plainest way."""
    if corpus.is_dir():
        for source in find_sources([corpus]):
            yield source.path.read_bytes().decode("utf-8-sig")
    else:
        with corpus.open(encoding="utf-8") as file:
            for line in file:
                yield json.loads(line)["text"]


def encode_with_preprocess(corpus: Path, prefix: str, tokenizer: Tokenizer) -> None:
    """What is measured."""
    sources = find_sources([corpus])
    preprocess(sources, prefix, tokenizer, append_eod=True, overwrite=True, show_progress=False)


def encode_one_by_one(corpus: Path, prefix: str, tokenizer: Tokenizer, library) -> None:
    """The baseline."""
    with IndexedDatasetWriter(prefix, optimal_dtype(tokenizer.vocab_size)) as writer:
        for text in documents(corpus):
            ids = library.encode(text).ids
            if ids:
                writer.add_document([*ids, tokenizer.eod_id], [len(ids) + 1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tokenizer", type=Path, help="folder of a tokenizer; default: one trained on the corpus"
    )
    parser.add_argument("--vocab-size", type=int, default=32768, help="of the trained one (32768)")
    parser.add_argument("--pairs", type=int, default=3)
    args = parser.parse_args()
    import tokenizers

    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        corpora = write_corpus(directory)
        if args.tokenizer is None:
            tokenizer = train_tokenizer(iterate_texts(find_sources([corpora["jsonl"]])), args.vocab_size)
        else:
            tokenizer = Tokenizer.load(args.tokenizer)
        tokenizer.save(directory / "tokenizer")
        library = tokenizers.Tokenizer.from_file(str(directory / "tokenizer" / "tokenizer.json"))
        num_bytes = sum(len(text.encode("utf-8")) for text in documents(corpora["jsonl"]))
        print(f"{num_bytes / 1e6:.1f} MB of text, {tokenizer.vocab_size} tokens, {tokenizer.engine_name}")
        for kind, corpus in corpora.items():
            compare(kind, corpus, num_bytes / 1e6, tokenizer, library, args.pairs)


def compare(kind: str, corpus: Path, mb: float, tokenizer: Tokenizer, library, pairs: int) -> None:
    """Time the two in turn and print the medians."""
    ours_prefix, other_prefix = str(corpus.parent / "ours"), str(corpus.parent / "other")
    ours, other = [], []
    for _ in range(pairs):
        ours.append(cpu_seconds(lambda: encode_with_preprocess(corpus, ours_prefix, tokenizer)))
        other.append(cpu_seconds(lambda: encode_one_by_one(corpus, other_prefix, tokenizer, library)))
    for path in (bin_path, idx_path):
        if path(f"{ours_prefix}_text_document").read_bytes() != path(other_prefix).read_bytes():
            raise SystemExit(f"{kind}: the two wrote different files")
    ratios = sorted(theirs / mine for theirs, mine in zip(other, ours, strict=True))
    print(
        f"{kind:6}  preprocess {mb / statistics.median(ours):6.1f} MB/s per core   "
        f"tokenizers.encode {mb / statistics.median(other):5.1f} MB/s per core   "
        f"{statistics.median(ratios):.1f} times as fast (pairs: {', '.join(f'{r:.1f}' for r in ratios)})"
    )


if __name__ == "__main__":
    main()
