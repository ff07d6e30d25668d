"""Implement ``ppfleetx tokenizer``, which trains a tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, dataclass
from pathlib import Path

from ppfleetx.commands.options import Command, option, switch, whole_number
from ppfleetx.config.errors import DataError
from ppfleetx.utils.output_files import refuse_unwritable


@dataclass(frozen=True, kw_only=True)
class TrainTokenizer(Command):
    """Train a byte-level BPE tokenizer on json lines (.gz, .zst), plain text, or folders of such files."""

    input: tuple[str, ...] = option("files and folders", default=MISSING, metavar="PATH")
    vocab_size: int = option("tokens, special ones included", default=MISSING)
    output: Path = option("where the files are written", default=MISSING, metavar="DIR")
    min_frequency: int = option(
        "how often a pair of neighbors must occur to be merged (default: 2)", default=2, type=whole_number
    )
    json_key: str = option("key of the text in json lines (default: text)", default="text")
    suffixes: str = option("in folders, read only files with these endings", default="", metavar=".py,.txt")
    overwrite: bool = switch("replace a tokenizer that already exists")

    def run(self) -> None:
        from ppfleetx.data.prepare.corpus_reader import find_sources, iterate_texts
        from ppfleetx.data.tokenizer.tokenizer import train_tokenizer
        from ppfleetx.utils.progress_bar import ProgressBar

        if (self.output / "tokenizer.json").exists() and not self.overwrite:
            raise DataError(f"{self.output} holds a tokenizer already; --overwrite replaces it")
        refuse_unwritable(self.output, "--output")  # checked before hours of training
        suffixes = [suffix for suffix in self.suffixes.split(",") if suffix]
        sources = find_sources(self.input, suffixes=suffixes)
        total = sum(source.num_bytes for source in sources) / 1e6
        with ProgressBar("reading", total=total, unit="MB") as bar:

            def texts() -> Iterator[str]:
                for text in iterate_texts(sources, self.json_key):
                    bar.advance(len(text) / 1e6)
                    yield text
                bar.advance(0, "learning merges")

            tokenizer = train_tokenizer(texts(), self.vocab_size, min_frequency=self.min_frequency)
        tokenizer.save(self.output)
        what = f"{tokenizer.vocab_size:,} tokens, end of document {tokenizer.eod_id}"
        if tokenizer.vocab_size < self.vocab_size:
            what += f" (the text has too few pairs for {self.vocab_size:,})"
        print(f"tokenizer with {what}: {self.output}")
