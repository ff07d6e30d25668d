"""The verbs for corpora: inspect, merge, convert and index tokenized corpora, and make a text corpus from the
source files of Python."""

from __future__ import annotations

import json
import time
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ppfleetx.commands.options import Command, ConfigOptions, option, positional, switch
from ppfleetx.config.errors import ConfigError, DataError
from ppfleetx.config.message_text import counted

if TYPE_CHECKING:
    from ppfleetx.config.sections.root import RunConfig


@dataclass(frozen=True, kw_only=True)
class InspectData(Command):
    """Show the contents of a tokenized corpus, verify its checksums, or write checksums for it.

    Exit code: 0 no damage; 1 damage was found (--verify); 2 there is no readable corpus, or the command line
    is wrong.
    """

    corpus: tuple[str, ...] = positional(
        "PREFIX", "corpora without .bin/.idx, or folders of them", default=MISSING, nargs="+"
    )
    verify: bool = switch("read everything and compare all checksums")
    write_checksums: bool = switch("write PREFIX.checksums.json for a pair as it is now")
    json: bool = switch("print the summary as JSON, one object per corpus")

    def run(self) -> int:
        from ppfleetx.data.tokenized_corpus import find_prefixes

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
    """Print what a tokenized corpus contains, such as its numbers of documents and tokens."""
    from ppfleetx.data.corpus_checks import summary, summary_text

    facts = summary(prefix)
    print(json.dumps(facts) if as_json else summary_text(facts))


def verify(prefix: str) -> int:
    """Check a corpus for damage, and print what was found. Its checksums are verified if it has them. Returns
    the exit code: 1 for damage, else 0."""
    from ppfleetx.data.corpus_checks import all_damage

    found, has_checksums = all_damage(prefix)
    for sentence in found:
        print(f"damaged: {sentence}")
    if not found:
        checked = "all checksums right" if has_checksums else "lengths and offsets agree; it has no checksums"
        print(f"sound: {prefix}, {checked}")
    return 1 if found else 0


def write_checksums(prefix: str) -> None:
    """Compute the checksums of a corpus and write them beside it. Raises DataError if the corpus already has
    checksums."""
    from ppfleetx.data.checksums import checksums_path, compute_checksums
    from ppfleetx.data.indexed_dataset import IndexedDataset

    IndexedDataset(prefix)  # raises if the corpus is visibly damaged
    path = checksums_path(prefix)
    if path.exists():
        raise DataError(f"{path} exists already; if the corpus was changed on purpose, remove it first")
    compute_checksums(prefix).write()
    print(f"wrote {path}")


@dataclass(frozen=True, kw_only=True)
class MergeData(Command):
    """Merge several .bin/.idx corpora into one, in the order given. A directory stands for all corpora in it,
    sorted by name.
    """

    input: tuple[str, ...] = option("prefixes and directories", default=MISSING, metavar="PATH")
    output_prefix: str = option("path of the result without .bin/.idx", default=MISSING, metavar="PREFIX")
    overwrite: bool = switch("replace an output that already exists")

    def run(self) -> None:
        from ppfleetx.data.tokenized_corpus import find_prefixes, merge

        prefixes = [prefix for path in self.input for prefix in find_prefixes(path)]
        merge(prefixes, self.output_prefix, overwrite=self.overwrite)
        print(f"{self.output_prefix}: {counted(len(prefixes), 'corpus')}, {_size(self.output_prefix)}")


@dataclass(frozen=True, kw_only=True)
class ConvertData(Command):
    """Write a corpus preprocessed by FleetX (_ids.npy with _idx.npz, or _ids.npz) as a .bin/.idx pair."""

    input: str = option("path of the corpus without _ids.npy", default=MISSING, metavar="PREFIX")
    output_prefix: str = option("path of the result without .bin/.idx", default=MISSING, metavar="PREFIX")
    overwrite: bool = switch("replace an output that already exists")

    def run(self) -> None:
        from ppfleetx.data.indexed_dataset import IndexedDataset
        from ppfleetx.data.tokenized_corpus import convert

        convert(self.input, self.output_prefix, overwrite=self.overwrite)
        dtype = IndexedDataset(self.output_prefix).dtype
        print(f"{self.output_prefix}: {_size(self.output_prefix)}, {dtype}")


def _size(prefix: str) -> str:
    from ppfleetx.data.indexed_dataset import IndexedDataset

    corpus = IndexedDataset(prefix)
    documents = corpus.document_indices.shape[0] - 1
    return f"{counted(documents, 'document', ',')}, {counted(corpus.num_tokens, 'token', ',')}"


@dataclass(frozen=True, kw_only=True)
class StdlibCorpus(Command):
    """Write the source files of the installed Python's standard library as JSON Lines. The result is a text
    corpus for experiments that needs no download.
    """

    output: Path = option("json lines file to write", default=MISSING, metavar="FILE")
    seed: int = option("seed of the order of the documents (default: 1234)", default=1234)
    overwrite: bool = switch("replace a file that already exists")

    def run(self) -> None:
        from ppfleetx.data.prepare.stdlib_corpus import write_stdlib_corpus

        num_documents, num_bytes = write_stdlib_corpus(self.output, self.seed, overwrite=self.overwrite)
        print(f"{num_documents:,} documents, {num_bytes / 1e6:.1f} MB of text: {self.output}")


@dataclass(frozen=True, kw_only=True)
class Index(ConfigOptions):
    """Build the index maps of a configuration's data sets, which list the samples in training order.

    A run then reads the maps from Data.<mode>.dataset.cache_dir, or from beside the corpus, and starts at
    once. The command prints the number of samples and a hash of their order: equal hashes mean the same
    samples in the same order.
    """

    def run(self) -> None:
        from ppfleetx.commands.initialize import made_directory
        from ppfleetx.config.loader import load_config
        from ppfleetx.config.sections.data import MODES
        from ppfleetx.data.build import build_dataloader
        from ppfleetx.data.corpus_checks import verify_corpora
        from ppfleetx.utils.log import configure_logging
        from ppfleetx.utils.progress_bar import ProgressBar

        configure_logging()
        cfg = load_config(self.config, self.override)
        parts = [("Train", "Train", cfg), *_evaluation_parts(cfg), ("Test", "Test", cfg)]
        for _, mode, one in parts:  # unlike a run, this verb needs writable cache directories
            section = getattr(one.Data, mode)
            if section is not None and section.dataset.cache_dir is not None:
                made_directory(one, f"Data.{mode}.dataset.cache_dir")
        verify_corpora(cfg, MODES)
        for title, mode, one in parts:
            if getattr(one.Data, mode) is None:
                print(f"{title}: not configured")
                continue
            started = time.perf_counter()
            with ProgressBar(f"{title}: index maps", total=None, unit="map"):
                loader = build_dataloader(one, mode, data_size=cfg.plan.data_size)
            print(f"{title}: {loader.describe()}")
            samples, seconds = counted(len(loader.dataset), "sample", ","), time.perf_counter() - started
            print(f"{title}: {samples} prepared, order {loader.fingerprint}, {seconds:.1f} s")


def _evaluation_parts(cfg: RunConfig) -> list[tuple[str, str, RunConfig]]:
    from ppfleetx.config.sections.root import data_sets

    sets = data_sets(cfg) or {None: cfg}
    return [("Eval" if name is None else f"Eval, {name}", "Eval", one) for name, one in sets.items()]
