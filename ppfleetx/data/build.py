"""Build the datasets and data loaders configured in ``Data.Train``, ``Data.Eval`` and ``Data.Test``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from ppfleetx.config.errors import ConfigError, DataError, MissingDataError
from ppfleetx.config.message_text import counted
from ppfleetx.config.registries import DATASETS, MODULES, TOKENIZERS
from ppfleetx.config.sections.data import MODES, Mode
from ppfleetx.data.blended import (
    BlendedDataset,
    blend_sizes,
    exhaustive_order,
    normalize,
    weighted_order,
)
from ppfleetx.data.dataloader import DataLoader, Dataset, GlobalBatchSampler, Tail
from ppfleetx.data.gpt_dataset import PADDING, GPTDataset, SampleOptions, index_directory, split_ranges
from ppfleetx.data.indexed_dataset import TokenStore
from ppfleetx.data.tokenized_corpus import find_prefixes, open_tokens
from ppfleetx.data.tokenizer.tokenizer import Tokenizer
from ppfleetx.utils.log import get_logger

if TYPE_CHECKING:
    from ppfleetx.config.sections.data import DatasetConfig
    from ppfleetx.config.sections.root import RunConfig


_SAMPLE = ("tokens", "labels", "position_ids", "loss_mask")


@dataclass(frozen=True)
class CorpusPart:
    """The part of a corpus that belongs to one split (Train, Eval or Test): the sequences ``[first, last)``.
    ``weight`` is its share in the blend.
    """

    corpus: TokenStore
    first: int
    last: int
    weight: float

    @property
    def num_tokens(self) -> int:
        return int(self.corpus.sizes[self.first : self.last].sum(dtype=np.int64))


def requested_samples(cfg: RunConfig, mode: Mode) -> int:
    """Return the number of samples that a run needs from its corpora. For Train, this is the number for all
    training steps; for Eval and Test, the number for one evaluation. The corpora can have fewer samples."""
    if mode == "Train":
        return cfg.batch.consumed_after(cfg.Engine.max_steps)
    engine = cfg.Engine
    # Unlike in Megatron-LM, all evaluations of a run read the same batches.
    num_batches = engine.eval_iters if mode == "Eval" else engine.test_iters or 10 * engine.eval_iters
    return cfg.batch.global_batch_size * num_batches


def build_dataloader(
    cfg: RunConfig,
    mode: Mode,
    data_rank: int = 0,
    data_size: int = 1,
) -> DataLoader:
    """Build the data loader of ``Data.<mode>`` for one data rank.

    The training loader never ends: after the last sample, it starts again. An evaluation loader yields the
    same batches in every evaluation: all samples of a finetuning dataset, or at most `requested_samples` of
    corpora. If its last batch is incomplete, padding samples with a loss mask of 0 are added. For corpora
    with ``drop_last``, the incomplete batch is left out instead.

    Raises the errors of `build_dataset`. Also raises ConfigError if the global batch is not divisible by
    micro batch size x data ranks, and DataError if the evaluation data have no full batch.
    """
    section, batch = getattr(cfg.Data, mode), cfg.batch
    dataset = build_dataset(cfg, mode)
    tail: Tail = "wrap"
    total, is_corpus = len(dataset), section.dataset.is_corpus
    shuffles = section.shuffles_for_training
    if mode != "Train":
        if is_corpus:
            total = min(total, requested_samples(cfg, mode))
        # With drop_last: False, no sample is read twice, and padding samples fill the last batch.
        tail = "drop" if is_corpus and section.sampler.drop_last else "pad"
        shuffles = is_corpus and section.sampler.shuffle
    sampler = GlobalBatchSampler(
        total,
        batch.global_batch_size,
        batch.micro_batch_size,
        data_rank,
        data_size,
        size_at=batch.size_at if mode == "Train" else None,
        tail=tail,
        shuffle_seed=_seed(cfg, mode) if shuffles else None,
    )
    if sampler.num_steps == 0:  # evaluation data without a full batch, such as a small exhaustive blend
        raise DataError(
            f"Data.{mode}: the dataset has {counted(total, 'sample', ',')}, less than the global batch of "
            f"{batch.global_batch_size:,}, and an incomplete batch is left out. To read it, set "
            f"Data.{mode}.sampler.drop_last to False"
        )
    return DataLoader(dataset, sampler, section.loader.num_workers)


def build_dataset(cfg: RunConfig, mode: Mode) -> Dataset:
    """Build the dataset that ``Data.<mode>.dataset`` describes. Raises ConfigError if the section is missing,
    if its dataset is unknown, or if the dataset needs a tokenizer and none is configured. Raises DataError if
    the data cannot be used, for example because a file is missing, damaged or too small."""
    section = getattr(cfg.Data, mode)
    if section is None:
        raise ConfigError("this run needs the section, which is not given", key=f"Data.{mode}")
    dataset = DATASETS.make(section.dataset.name, cfg, mode, gives=Dataset)
    if not DATASETS.is_built_in(section.dataset.name):
        _check_own_dataset(dataset, cfg, mode)
    return dataset


def _check_own_dataset(dataset: Dataset, cfg: RunConfig, mode: Mode) -> None:
    """Raise ConfigError if a plugin's dataset is empty, or if its first sample or, for an evaluation, its
    padding sample cannot be used. Without this check, the network or the loss would fail later."""
    section = getattr(cfg.Data, mode).dataset
    key = f"Data.{mode}.dataset.name"

    def refuse(rule: str) -> NoReturn:
        raise ConfigError(rule, key=key, value=section.name)

    if len(dataset) < 1:
        refuse("the data set has no samples")
    own_task = not MODULES.is_built_in(cfg.Model.module)
    for index in (0,) if mode == "Train" else (0, PADDING):
        sample, which = dataset[index], f"sample {index} of the data set"
        if not isinstance(sample, Mapping):
            refuse(f"{which} must be a mapping of names to arrays, not {type(sample).__name__}")
        lacks = [name for name in _SAMPLE if name not in sample]
        if lacks and not own_task:
            refuse(f"{which} must have {', '.join(_SAMPLE)}; it lacks {', '.join(lacks)}")
        for name in () if own_task else _SAMPLE:
            shape = np.shape(sample[name])
            if shape != (section.max_seq_len,):
                wanted = f"the shape [{section.max_seq_len}] (max_seq_len)"
                refuse(f"{name} of {which} must have {wanted}, not {[*shape]}")
        ids, last = np.asarray(sample.get("tokens", ())), cfg.Model.vocab_size - 1
        if ids.size and not 0 <= ids.min() <= ids.max() <= last:
            refuse(
                f"{which} has token ids from {ids.min()} to {ids.max()}; Model.vocab_size allows 0 to {last}"
            )
        if index == PADDING and np.any(sample.get("loss_mask", 0.0)):
            refuse(f"{which} fills the last batch of an evaluation: its loss_mask must be zeros")


def gpt_dataset(cfg: RunConfig, mode: Mode) -> GPTDataset | BlendedDataset:
    """Build a dataset for pretraining from the tokenized corpora in ``Data.<mode>.dataset``, blended if there
    are several. Raises DataError if a corpus is missing, damaged or too small, or if an option needs an
    end-of-document id that is not known."""
    section = getattr(cfg.Data, mode)
    dataset_cfg = section.dataset
    options = SampleOptions(
        sequence_length=dataset_cfg.max_seq_len,
        reset_position_ids=dataset_cfg.reset_position_ids,
        reset_attention_mask=dataset_cfg.reset_attention_mask,
        eod_mask_loss=dataset_cfg.eod_mask_loss,
        eod_id=_eod_id(cfg, dataset_cfg),
        vocab_size=cfg.Model.vocab_size,
    )
    parts = _parts(cfg, mode)
    num_samples = requested_samples(cfg, mode)
    one_epoch = sum((part.num_tokens - 1) // options.sequence_length for part in parts)
    if mode != "Train" and not section.sampler.drop_last:
        num_samples = min(num_samples, one_epoch)
    if mode == "Train" and cfg.Engine.run_mode == "epoch":
        num_samples = min(num_samples, one_epoch * cfg.Engine.num_train_epochs)
    ordered = _order(parts, options, max(1, num_samples), _seed(cfg, mode), mode, dataset_cfg)
    if isinstance(ordered, BlendedDataset):
        ordered.tells_sources = mode == "Train" and cfg.Engine.log_source_loss
    return ordered


def load_tokenizer(cfg: RunConfig) -> Tokenizer | None:
    """Load the tokenizer that ``Data.tokenizer`` describes. Returns None if there is no such section, or if
    its ``name`` is BPE, the default, and it sets no files. Raises DataError if the tokenizer cannot be
    loaded."""
    files = cfg.Data.tokenizer
    if files is None or (not files.given and files.name == "BPE"):
        return None
    key = f"Data.tokenizer.{next(iter(files.given), 'name')}"
    try:
        return TOKENIZERS.make(files.name, files, gives=Tokenizer)
    except DataError as error:
        raise type(error)(f"{key}{_place(cfg, key)}: {error}") from error


def _place(cfg: RunConfig, key: str) -> str:
    return f" ({cfg.origins.get(key, 'default')})"


def _eod_id(cfg: RunConfig, dataset_cfg: DatasetConfig) -> int | None:
    """Return the end-of-document id that the dataset's section sets. If the section sets none, but has an
    option that needs the id, return the tokenizer's id. Otherwise return None."""
    needed = dataset_cfg.reset_position_ids or dataset_cfg.reset_attention_mask or dataset_cfg.eod_mask_loss
    if dataset_cfg.eod_id is not None or not needed:
        return dataset_cfg.eod_id
    tokenizer = load_tokenizer(cfg)
    return None if tokenizer is None else tokenizer.eod_id


def _seed(cfg: RunConfig, mode: Mode) -> int:
    seed = getattr(cfg.Data, mode).dataset.seed
    return cfg.Global.seed if seed is None else seed


_WEIGHT = re.compile(r"\d*\.?\d+")  # Megatron-LM's list has them between the prefixes


def open_corpora(cfg: RunConfig, mode: Mode) -> list[list[TokenStore]]:
    """Open the corpora named by ``Data.<mode>.dataset.input_dir``. Returns one list per entry, because an
    entry can be a directory of several corpora. Raises DataError if a corpus is missing or damaged."""
    section = getattr(cfg.Data, mode)
    key = section.key_of(mode, "input_dir")
    try:
        return [[open_tokens(prefix) for prefix in find_prefixes(entry)] for entry in section.dataset.inputs]
    except DataError as error:
        hint = ""
        if isinstance(error, MissingDataError):
            hint = f". ppfleetx prepare makes a corpus of text; name it with -o {key}=PREFIX"
            if any(_WEIGHT.fullmatch(word) for entry in section.dataset.inputs for word in entry.split()):
                hint = f". Weights have a key of their own: -o {key}=[PREFIX,PREFIX] "
                hint += f"-o {section.key_of(mode, 'weights')}=[0.3,0.7]"
        raise type(error)(f"{key}{_place(cfg, key)}: {error}{hint}") from error


def _parts(cfg: RunConfig, mode: Mode) -> list[CorpusPart]:
    dataset_cfg = getattr(cfg.Data, mode).dataset
    weights = dataset_cfg.weights
    number = MODES.index(mode)
    groups = [
        [CorpusPart(corpus, *split_ranges(len(corpus), dataset_cfg.split)[number], 1.0) for corpus in group]
        for group in open_corpora(cfg, mode)
    ]
    parts = [part for group in groups for part in group]
    if len(parts) == 1:
        return parts
    # The corpora of a directory share the directory's weight in proportion to their tokens.
    totals = [max(1, sum(part.num_tokens for part in group)) for group in groups]
    factors = weights if weights is not None else [float(total) for total in totals]
    parts = [
        replace(part, weight=factor * (part.num_tokens / total))
        for group, factor, total in zip(groups, factors, totals, strict=True)
        for part in group
    ]
    return _blend_parts(parts, dataset_cfg, mode)


def _blend_parts(parts: list[CorpusPart], dataset_cfg: DatasetConfig, mode: Mode) -> list[CorpusPart]:
    """Return those of ``parts`` that are blended, with weights that sum to 1. Parts of weight 0 are left out.
    If no weights are configured, parts too short for one sample are also left out, unless all are too short.
    """
    if dataset_cfg.weights is None:
        how = "in proportion to their tokens" if dataset_cfg.blend == "shares" else "exhaustively"
        get_logger().info(f"{mode}: {len(parts)} corpora, blended {how}")
        small = [part for part in parts if part.num_tokens <= dataset_cfg.max_seq_len]
        if small and len(small) < len(parts):
            names = ", ".join(part.corpus.prefix for part in small)
            get_logger().warning(f"{mode}: left out, since their split is shorter than one sample: {names}")
            parts = [part for part in parts if part.num_tokens > dataset_cfg.max_seq_len]
    parts = [part for part in parts if part.weight > 0] or parts[:1]
    weights = normalize([part.weight for part in parts])
    return [replace(part, weight=weight) for part, weight in zip(parts, weights, strict=True)]


def _order(
    parts: list[CorpusPart],
    options: SampleOptions,
    num_samples: int,
    seed: int,
    mode: Mode,
    dataset_cfg: DatasetConfig,
) -> GPTDataset | BlendedDataset:
    cache_dir = dataset_cfg.cache_dir

    def dataset(part: CorpusPart, size: int | None, at_least: int = 0) -> GPTDataset:
        return GPTDataset(
            part.corpus,
            part.first,
            part.last,
            options,
            num_samples=size,
            at_least=at_least,
            seed=seed,
            name=mode,
            cache_dir=cache_dir,
        )

    if len(parts) == 1:
        if dataset_cfg.blend == "exhaustive":
            get_logger().info(f"{mode}: one corpus is not a blend; it is read as often as the run needs")
        return dataset(parts[0], num_samples)
    directory = index_directory(parts[0].corpus, cache_dir)
    if dataset_cfg.blend == "exhaustive":
        datasets = [dataset(part, None) for part in parts]
        order = exhaustive_order([len(dataset) for dataset in datasets], num_samples, directory)
        _warn_of_repetition(order.dataset_index.shape[0], num_samples, mode)
    else:
        weights = [part.weight for part in parts]
        total, sizes = blend_sizes(weights, num_samples)
        order = weighted_order(weights, total, directory)
        # For some short blends, SURPLUS is too small, and Megatron-LM raises an error. Here, `at_least` adds
        # the missing samples.
        needed = zip(parts, sizes, order.counts, strict=True)
        datasets = [dataset(part, size, at_least=count) for part, size, count in needed]
    return BlendedDataset(datasets, order)


def _warn_of_repetition(num_prepared: int, num_samples: int, mode: Mode) -> None:
    if mode == "Train" and num_samples > num_prepared:
        get_logger().warning(
            f"{mode}: the run reads {num_samples:,} samples, and the exhaustive blend has {num_prepared:,}: "
            "after them they come again, in the same order unless Data.Train.sampler.shuffle is True"
        )
