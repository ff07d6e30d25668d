"""Implement ``ppfleetx prepare``, which encodes text as a corpus."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from typing import TYPE_CHECKING, Literal

from ppfleetx.commands.options import Command, option, switch, whole_number
from ppfleetx.config.errors import ConfigError, DataError
from ppfleetx.utils.machine import available_cpus

if TYPE_CHECKING:
    from ppfleetx.data.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Prepare(Command):
    """Encode text as a tokenized corpus, PREFIX_KEY_document.bin and .idx. The input is json lines (.gz,
    .zst), plain text, or folders of such files.

    Megatron-LM's and PaddleFleetX's names of these options are accepted too.
    """

    input: tuple[str, ...] = option(
        "files and folders, in the order they are to be written",
        "--input",
        "--input_path",
        "--input-path",
        default=MISSING,
        metavar="PATH",
    )
    output_prefix: str = option(
        "start of the output names", "--output-prefix", "--output_prefix", default=MISSING, metavar="PREFIX"
    )
    tokenizer: str | None = option(
        "folder with tokenizer.json, or with vocab.json and merges.txt",
        "--tokenizer",
        "--tokenizer-model",
        "--model_name",
        metavar="DIR",
    )
    vocab_file: str | None = option(
        "vocab.json, instead of --tokenizer", "--vocab-file", "--vocab_file", metavar="FILE"
    )
    merge_file: str | None = option(
        "merges.txt, with --vocab-file", "--merge-file", "--merge_file", metavar="FILE"
    )
    eod_token: str | None = option(
        "end of a document (default: the eos_token of the tokenizer's files, else <|endoftext|>)",
        metavar="TOKEN",
    )
    json_keys: tuple[str, ...] = option(
        "keys of the json objects, one pair of files each (default: text)",
        "--json-keys",
        "--json-key",
        "--json_key",
        "--json_keys",
        default=("text",),
        metavar="KEY",
    )
    append_eod: bool = switch(
        "end each document with the end-of-document token",
        "--append-eod",
        "--append_eod",
        "--append_eos",
        "--append-eos",
    )
    workers: int | None = option("processes (default: one for each core)", type=whole_number)
    suffixes: str = option("in folders, read only files with these endings", default="", metavar=".py,.txt")
    split_on: Literal["file", "line", "blank-line"] = option(
        "what one document of a plain text file is (default: file)", default="file"
    )
    max_document_mb: float = option(
        "longest line, paragraph or packed file, in 10^6 bytes; longer ones are left out (default: 64)",
        default=64,
        metavar="N",
    )
    tokenizer_type: Literal["GPT2BPETokenizer", "HuggingFaceTokenizer"] | None = option(
        "Megatron-LM's name of a kind of tokenizer; the tokenizer's files decide",
        "--tokenizer-type",
        "--tokenizer_type",
    )
    dataset_impl: Literal["mmap"] | None = option(
        "Megatron-LM's name of the format, which is the only one", "--dataset-impl", "--dataset_impl"
    )
    log_interval: int | None = option(
        "Megatron-LM's; a progress bar is shown instead",
        "--log-interval",
        "--log_interval",
        type=whole_number,
        metavar="N",
    )
    strict: bool = switch("an empty or unreadable document is an error")
    overwrite: bool = switch("replace an output that already exists")

    def run(self) -> None:
        from ppfleetx.data.prepare.corpus_reader import find_sources
        from ppfleetx.data.prepare.preprocess import preprocess

        if self.eod_token is not None and not self.append_eod:
            raise ConfigError("needs --append-eod", key="--eod-token", value=self.eod_token)
        if not 0.001 <= self.max_document_mb <= 2000:
            raise ConfigError(
                "must be from 0.001 to 2000", key="--max-document-mb", value=self.max_document_mb
            )
        suffixes = [suffix for suffix in self.suffixes.split(",") if suffix]
        sources = find_sources(self.input, suffixes=suffixes, split_on=self.split_on)
        tokenizer = self.load_tokenizer()
        if self.tokenizer_type == "HuggingFaceTokenizer" and tokenizer.prefix_ids:
            raise ConfigError(
                "makes Megatron-LM begin each document with this tokenizer's BOS, and this program never "
                "does. Leave out the option to make a corpus without BOS",
                key="--tokenizer-type",
                value=self.tokenizer_type,
            )
        report = preprocess(
            sources,
            self.output_prefix,
            tokenizer,
            keys=self.json_keys,
            append_eod=self.append_eod,
            workers=self.workers or available_cpus(),
            strict=self.strict,
            max_document_bytes=round(1e6 * self.max_document_mb),
            overwrite=self.overwrite,
        )
        print(report)

    def load_tokenizer(self) -> Tokenizer:
        """Load the tokenizer that the options name. Raises DataError if they name no tokenizer, or more than
        one."""
        from ppfleetx.data.tokenizer.tokenizer import Tokenizer

        names_vocab, names_merges = self.vocab_file is not None, self.merge_file is not None
        if (self.tokenizer is not None) == names_vocab or names_vocab != names_merges:
            raise DataError("give --tokenizer, or --vocab-file and --merge-file")
        if self.tokenizer is not None:
            return Tokenizer.load(self.tokenizer, eod_token=self.eod_token)
        return Tokenizer.from_vocab_and_merges(self.vocab_file, self.merge_file, eod_token=self.eod_token)
