"""Verbs for tokenised corpora: ``inspect-data``, ``merge-data``, ``convert-data``, ``stdlib-corpus``."""

from __future__ import annotations

import json
from dataclasses import MISSING, dataclass
from pathlib import Path

from ppfleetx.commands.options import Command, option, positional, switch
from ppfleetx.config.counts import counted
from ppfleetx.config.errors import ConfigError, DataError


@dataclass(frozen=True, kw_only=True)
class InspectData(Command):
    """Show what a tokenised corpus holds, compare it with its checksums, or write checksums for it.

    Exit code: 0 all is well; 1 damage was found (--verify); 2 there is no corpus that could be looked at, or
    the command line is wrong.
    """

    corpus: tuple[str, ...] = positional(
        "PREFIX", "corpora without .bin/.idx, or folders of them", default=MISSING, nargs="+"
    )
    verify: bool = switch("read everything and compare all checksums")
    write_checksums: bool = switch("write PREFIX.checksums.json for a pair as it is now")
    json: bool = switch("print the summary as JSON, an object a corpus")

    def run(self) -> int:
        """Show, verify, or write checksums."""
        from ppfleetx.data.corpus_paths import find_prefixes

        if self.verify + self.write_checksums + self.json > 1:
            raise ConfigError("--verify, --write-checksums and --json do different things; give one of them")
        code = 0
        for prefix in [prefix for entry in self.corpus for prefix in find_prefixes(entry)]:
            if self.verify:
                code = max(code, verify(prefix))
            elif self.write_checksums:
                write_checksums(prefix)
            else:
                show(prefix, self.json)
        return code


def show(prefix: str, as_json: bool) -> None:
    """Print what the corpus holds."""
    from ppfleetx.data.prepare.corpus_summary import summary, summary_text

    facts = summary(prefix)
    print(json.dumps(facts) if as_json else summary_text(facts))


def verify(prefix: str) -> int:
    """Compare a corpus with its checksums; prints each damage."""
    from ppfleetx.data.verify import all_damage

    found, has_checksums = all_damage(prefix)
    for sentence in found:
        print(f"damaged: {sentence}")
    if not found:
        checked = "all checksums right" if has_checksums else "lengths and offsets agree; it has no checksums"
        print(f"sound: {prefix}, {checked}")
    return 1 if found else 0


def write_checksums(prefix: str) -> None:
    """Write the checksums of a pair that has none.

    Raises:
        DataError: the pair is damaged, or has checksums already.
    """
    from ppfleetx.data.checksums import checksums_path, compute_checksums
    from ppfleetx.data.indexed import IndexedDataset

    IndexedDataset(prefix)  # what is damaged for all to see gets none
    path = checksums_path(prefix)
    if path.exists():
        raise DataError(f"{path} exists already; if the corpus was changed on purpose, remove it first")
    compute_checksums(prefix).write()
    print(f"wrote {path}")


@dataclass(frozen=True, kw_only=True)
class MergeData(Command):
    """Write several .bin/.idx corpora as one, in the order given (a directory: all its corpora, by name)."""

    input: tuple[str, ...] = option("prefixes and directories", default=MISSING, metavar="PATH")
    output_prefix: str = option("path of the result without .bin/.idx", default=MISSING, metavar="PREFIX")
    overwrite: bool = switch("replace an output that is there already")

    def run(self) -> None:
        """Merge, and say what was written."""
        from ppfleetx.data.corpus_paths import find_prefixes
        from ppfleetx.data.prepare.merging import merge

        prefixes = [prefix for path in self.input for prefix in find_prefixes(path)]
        merge(prefixes, self.output_prefix, overwrite=self.overwrite)
        print(f"{self.output_prefix}: {counted(len(prefixes), 'corpus')}, {_size(self.output_prefix)}")


@dataclass(frozen=True, kw_only=True)
class ConvertData(Command):
    """Write a corpus preprocessed by FleetX (_ids.npy with _idx.npz, or _ids.npz) as a .bin/.idx pair."""

    input: str = option("path of the corpus without _ids.npy", default=MISSING, metavar="PREFIX")
    output_prefix: str = option("path of the result without .bin/.idx", default=MISSING, metavar="PREFIX")
    overwrite: bool = switch("replace an output that is there already")

    def run(self) -> None:
        """Convert, and say what was written."""
        from ppfleetx.data.fleetx_format import convert
        from ppfleetx.data.indexed import IndexedDataset

        convert(self.input, self.output_prefix, overwrite=self.overwrite)
        dtype = IndexedDataset(self.output_prefix).dtype
        print(f"{self.output_prefix}: {_size(self.output_prefix)}, {dtype}")


def _size(prefix: str) -> str:
    from ppfleetx.data.indexed import IndexedDataset

    corpus = IndexedDataset(prefix)
    documents = corpus.document_indices.shape[0] - 1
    return f"{counted(documents, 'document', ',')}, {counted(corpus.num_tokens, 'token', ',')}"


@dataclass(frozen=True, kw_only=True)
class StdlibCorpus(Command):
    """Write the source files of this Python's standard library as json lines: a corpus without a download."""

    output: Path = option("json lines file to write", default=MISSING, metavar="FILE")
    seed: int = option("of the order of the documents (default: 1234)", default=1234)
    overwrite: bool = switch("replace a file that is there already")

    def run(self) -> None:
        """Write the file."""
        from ppfleetx.data.prepare.stdlib_corpus import write_stdlib_corpus

        num_documents, num_bytes = write_stdlib_corpus(self.output, self.seed, overwrite=self.overwrite)
        print(f"{num_documents:,} documents, {num_bytes / 1e6:.1f} MB of text: {self.output}")
