"""Configuration section ``Data``: datasets, the order of samples, loading and the tokenizer."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field, PrivateAttr, ValidationError, model_validator

from ppfleetx.config.errors import RuleError
from ppfleetx.config.field_types import (
    Bool,
    CountInt,
    Float,
    Int,
    NonNegativeFloat,
    PathText,
    Seed,
    Size,
    Text,
)
from ppfleetx.config.message_text import counted
from ppfleetx.config.registries import DATASETS, TOKENIZERS, unknown_options
from ppfleetx.config.registry import Registered
from ppfleetx.config.section import Section

GLUE_OUTPUTS = {
    name: DATASETS.traits(name).num_outputs
    for name in DATASETS.names()
    if DATASETS.traits(name).num_outputs is not None
}
"""Number of classes of each GLUE task; 1: the task predicts a number."""

_GLUE_PARTS = ("train", "dev", "test")
_MNLI_PARTS = ("train", "dev_matched", "dev_mismatched", "test_matched", "test_mismatched")
_CORPUS_KEYS = (
    "weights",
    "reset_position_ids",
    "reset_attention_mask",
    "eod_mask_loss",
    "eod_id",
    "cache_dir",
    "blend",
    "verify",
)
_SET_NAME = re.compile(r"[\w-][\w.-]*")
Mode = Literal["Train", "Eval", "Test"]
MODES: tuple[Mode, ...] = get_args(Mode)
"""The sections of ``Data`` that have a dataset, in the order of the shares in ``split``."""
_SHARES = re.compile(r"\s*(\d+(\.\d*)?|\.\d+)([,/\s]+(\d+(\.\d*)?|\.\d+))*\s*", re.ASCII)


def split_shares(split: str | Sequence[float]) -> tuple[float, ...]:
    """Parse a corpus's ``split``, the shares of training, evaluation and test: ``"949,50,1"`` or a list."""
    return tuple(map(float, re.split(r"[,/\s]+", split.strip()) if isinstance(split, str) else split))


class DatasetConfig(Section):
    """A dataset: its files, and how samples are cut from them."""

    name: Annotated[str, Registered(DATASETS)] = "GPTDataset"
    """GPTDataset (preprocessed corpora), PromptResponseDataset (jsonl, loss only on the response),
    ChatDataset (jsonl, also in the formats of ShareGPT and Alpaca, loss on the assistant's turns), a GLUE
    task, or a dataset of your own (docs/extending.md)."""
    options: dict[str, Bool | Int | Float | Text] = Field(default_factory=dict)
    """For ChatDataset: `chat_template`, the name of one of the tokenizer's templates, or a file. For a
    dataset of your own: the options it was registered with."""
    input_dir: PathText | tuple[PathText, ...] = "./data"
    """A corpus prefix, a directory of corpora, or a list of these. For other datasets: the directory of the
    files `{split}.jsonl` (or `.jsonl.gz`, `.jsonl.zst`, `.json`) or `{split}.tsv`."""
    weights: tuple[NonNegativeFloat, ...] | None = None
    """Weight of each entry of `input_dir` in the blend (the weights are normalized); null: in proportion to
    its tokens."""
    blend: Literal["shares", "exhaustive"] = "shares"
    """How several corpora are mixed. shares: by `weights`; a corpus is repeated as often as its share
    requires. exhaustive: every sample of every corpus once, evenly spread, as Megatron-LM does without
    weights. `weights` must then be null."""
    split: Text | tuple[NonNegativeFloat, ...] = (969, 30, 1)
    """Shares of documents for Train, Eval and Test, e.g. `[969, 30, 1]`. For GLUE tasks and files with
    records (PromptResponseDataset, ChatDataset): the name of the file, e.g. `train`."""
    max_seq_len: Size = 1024
    """Tokens per sample; longer texts are cut. The default is limited to the model's context length."""
    prompt_field: Text = "prompt"
    """PromptResponseDataset: field of the prompt."""
    response_field: Text = "response"
    """PromptResponseDataset: field of the response, which is learned."""
    seed: Seed | None = None
    """Seed for the order of samples; null: `Global.seed`."""
    reset_position_ids: Bool = False
    """Positions start again at 0 after each end of document."""
    reset_attention_mask: Bool = False
    """Tokens only attend to their own document."""
    eod_mask_loss: Bool = False
    """No loss where the input is the end-of-document token."""
    eod_id: CountInt | None = None
    """Id of the end-of-document token; null: the tokenizer's."""
    cache_dir: PathText | None = None
    """Directory of the index maps; null: beside the corpus."""
    verify: Literal["none", "index", "full"] = "index"
    """Parts of a corpus to compare with its checksums when a run starts. index: the lengths of both files and
    the whole `.idx`, if the corpus has checksums. full: also every token; a corpus without checksums is
    refused. Each node reads the corpus once, at about 1 GB per second and core."""

    def violations(self) -> Iterator[RuleError]:
        if not self.inputs:
            yield RuleError(("input_dir",), "needs at least one entry")
        if self.weights is not None:
            if self.blend == "exhaustive":
                yield RuleError(
                    ("weights", "blend"), "an exhaustive blend takes all samples: it has no weights"
                )
            if len(self.weights) != len(self.inputs):
                yield RuleError(
                    ("weights", "input_dir"),
                    f"{counted(len(self.weights), 'weight')} for {counted(len(self.inputs), 'corpus')}",
                )
            if not 0 < sum(self.weights) < math.inf:
                yield RuleError(("weights",), "must have a sum that is greater than 0 and finite")
        for key in ("prompt_field", "response_field"):
            if self.name != "PromptResponseDataset" and self._is_set(key):
                yield RuleError((key, "name"), f"{self.name} has no such option; PromptResponseDataset has")
        yield from unknown_options(self.name, self.options, DATASETS.traits(self.name).options)
        if self.is_texts:
            yield from self._text_violations()
        elif self.is_corpus and not self._has_shares:
            rule = "needs up to three shares (Train, Eval, Test), not all of them 0, e.g. [969, 30, 1]"
            yield RuleError(("split",), rule)

    @property
    def inputs(self) -> tuple[str, ...]:
        return (self.input_dir,) if isinstance(self.input_dir, str) else self.input_dir

    @property
    def is_corpus(self) -> bool:
        """Whether samples are cut from corpora of token ids, rather than being records of text files."""
        return DATASETS.traits(self.name).kind == "corpus"

    @property
    def is_texts(self) -> bool:
        """Whether samples are records of text files (such as JSON lines) that ``Data.tokenizer`` encodes."""
        return DATASETS.traits(self.name).kind == "texts"

    @property
    def is_glue(self) -> bool:
        return DATASETS.traits(self.name).num_outputs is not None

    def _is_set(self, key: str) -> bool:
        return getattr(self, key) != type(self).model_fields[key].default

    def _text_violations(self) -> Iterator[RuleError]:
        for key in _CORPUS_KEYS:
            if self._is_set(key):
                yield RuleError((key, "name"), f"{self.name} has no such option; only GPTDataset has")
        if not isinstance(self.input_dir, str):
            yield RuleError(("input_dir", "name"), f"{self.name} reads one directory, not a list of them")
        parts = _MNLI_PARTS if self.name == "MNLI" else _GLUE_PARTS if self.is_glue else ()
        if not isinstance(self.split, str) or (parts and self.split not in parts):
            choice = f"one of {', '.join(parts)}" if parts else "a file's name without .jsonl, e.g. train"
            yield RuleError(("split", "name"), f"{self.name} wants {choice}")

    @property
    def _has_shares(self) -> bool:
        if isinstance(self.split, str) and not _SHARES.fullmatch(self.split):
            return False
        shares = split_shares(self.split)
        return 1 <= len(shares) <= 3 and 0 < sum(shares) < math.inf


class SamplerConfig(Section):
    """The order in which samples are read, and what happens to an incomplete last batch."""

    name: Literal["GPTBatchSampler"] = "GPTBatchSampler"
    """The sampler. GPTBatchSampler continues after the consumed samples on resume, and gives the same global
    batches under every parallel plan."""
    shuffle: Bool = False
    """Shuffle again, in addition to the dataset's own order. For a GLUE task or records, Train is always
    reshuffled in each pass, and Eval and Test keep the order of the file."""
    drop_last: Bool = True
    """Leave out the last incomplete global batch. For a GLUE task or records, Eval and Test are always read
    completely."""


class LoaderConfig(Section):
    """How batches are prepared ahead of time."""

    num_workers: CountInt = 1
    """Threads that prepare batches ahead of time; 0: the training thread itself."""


class DataSplitConfig(Section):
    """The data of training (`Data.Train`), evaluation (`Data.Eval`) or test (`Data.Test`)."""

    dataset: DatasetConfig = DatasetConfig()
    sampler: SamplerConfig = SamplerConfig()
    loader: LoaderConfig = LoaderConfig()

    @property
    def shuffles_for_training(self) -> bool:
        """Whether these data, if used for training, have a new random order in each pass."""
        traits = DATASETS.traits(self.dataset.name)
        return self.sampler.shuffle or (traits.kind != "corpus" and traits.shuffled)

    def key_of(self, mode: str, name: str) -> str:
        """The dotted key that sets the dataset's field ``name``, for messages."""
        return f"Data.{mode}.dataset.{name}"


class EvalSetConfig(Section):
    """One of several evaluation sets. Its keys replace those of `Data.Eval.dataset`."""

    SAYS: ClassVar[str] = "a path, or a mapping with input_dir, weights, split and options"

    input_dir: PathText | tuple[PathText, ...] | None = None
    """As in `dataset`; null: the same as `dataset`, with its weights."""
    weights: tuple[NonNegativeFloat, ...] | None = None
    """As in `dataset`, for this `input_dir`."""
    split: Text | tuple[NonNegativeFloat, ...] | None = None
    """As in `dataset`; null: the same as `dataset`. `[0, 1, 0]` is the whole corpus."""
    options: dict[str, Bool | Int | Float | Text] | None = None
    """As in `dataset`; null: the same as `dataset`."""

    @model_validator(mode="before")
    @classmethod
    def _from_path(cls, value: Any) -> Any:
        return {"input_dir": value} if isinstance(value, str) else value

    def over(self, dataset: DatasetConfig) -> DatasetConfig:
        """Return a copy of ``dataset`` in which the keys of this evaluation set replace those of ``dataset``.

        Raises:
            RuleError: the result breaks a rule of datasets.
        """
        own = {key: value for key in ("split", "options") if (value := getattr(self, key)) is not None}
        if self.input_dir is not None:
            own |= {"input_dir": self.input_dir, "weights": self.weights}
        elif self.weights is not None:
            own["weights"] = self.weights
        try:
            return DatasetConfig.model_validate({**dataset.model_dump(), **own})
        except ValidationError as error:
            cause = error.errors()[0].get("ctx", {}).get("error")
            if isinstance(cause, RuleError):
                raise cause from None
            raise


class EvalConfig(DataSplitConfig):
    """Evaluation data: one dataset, or several sets with names."""

    sets: dict[Text, EvalSetConfig] = Field(default_factory=dict)
    """Several evaluation sets by name, each evaluated separately, e.g. `{wiki: data/wiki_text_document, code:
    {input_dir: data/code_text_document, split: [0, 1, 0]}}`. Keys that a set does not give are taken from
    `dataset`, which is then not evaluated itself. `Engine.save_load.keep_best` uses the first set."""

    _set: str | None = PrivateAttr(default=None)

    def violations(self) -> Iterator[RuleError]:
        for name, one in self.sets.items():
            if not _SET_NAME.fullmatch(name):
                yield RuleError(
                    ("sets",), f"{name!r} is not a name; it may have letters, digits, `_`, `-` and `.`"
                )
            try:
                one.over(self.dataset)
            except RuleError as violation:
                keys = tuple(f"sets.{name}.{key}" for key in violation.keys)
                yield RuleError(keys, violation.rule)

    def of_set(self, name: str) -> EvalConfig:
        """A copy of this section with only the evaluation set ``name``."""
        one = self.model_copy(update={"dataset": self.sets[name].over(self.dataset), "sets": {}})
        one._set = name
        return one

    def key_of(self, mode: str, name: str) -> str:
        if self._set is not None and name in EvalSetConfig.model_fields:
            return f"Data.{mode}.sets.{self._set}.{name}"
        return super().key_of(mode, name)


class TokenizerConfig(Section):
    """The tokenizer. For `BPE`, set `dir`, or `tokenizer_file`, or both `vocab_file` and `merges_file`."""

    name: Annotated[str, Registered(TOKENIZERS)] = "BPE"
    """BPE reads the files below; another name is a tokenizer of your own (docs/extending.md)."""
    dir: PathText | None = None
    """Directory with tokenizer.json, or with vocab.json and merges.txt."""
    tokenizer_file: PathText | None = None
    """A tokenizer.json."""
    vocab_file: PathText | None = None
    """A GPT-2 style vocab.json."""
    merges_file: PathText | None = None
    """A GPT-2 style merges.txt."""
    eos_token: Text | None = None
    """Token for the end of a document and for padding; null: the `eos_token` in the directory's files, or
    else `<|endoftext|>`."""

    @property
    def given(self) -> tuple[str, ...]:
        """The keys among ``dir``, ``tokenizer_file`` and ``vocab_file`` that are set. Only one may be set."""
        return tuple(key for key in ("dir", "tokenizer_file", "vocab_file") if getattr(self, key) is not None)

    def violations(self) -> Iterator[RuleError]:
        if (self.vocab_file is None) != (self.merges_file is None):
            missing = "vocab_file" if self.vocab_file is None else "merges_file"
            yield RuleError((missing,), "vocab_file and merges_file are given together")
        if len(self.given) > 1:
            yield RuleError(self.given, "name the tokenizer's files in one way only")


class DataConfig(Section):
    """Data for training, evaluation and test, and the tokenizer."""

    Train: DataSplitConfig | None = None
    """Training data; needed by `ppfleetx train`."""
    Eval: EvalConfig | None = None
    """Evaluation data; null: no evaluation."""
    Test: DataSplitConfig | None = None
    """Test data. `ppfleetx eval` predicts it for a GLUE task, and `ppfleetx index` prepares it; no other
    command reads it."""
    tokenizer: TokenizerConfig | None = None
    """The tokenizer. Generation, datasets of text records, and `eod_mask_loss`/`reset_*` without `eod_id`
    need it."""

    def sections(self, *modes: str) -> Iterator[tuple[str, DataSplitConfig]]:
        """Yield (mode, section) for each of ``modes`` whose section is set.

        A mode with named evaluation sets is yielded once per set, with a section for this set only.
        """
        for mode in modes:
            section = getattr(self, mode)
            if isinstance(section, EvalConfig) and section.sets:
                yield from ((mode, section.of_set(name)) for name in section.sets)
            elif section is not None:
                yield mode, section
