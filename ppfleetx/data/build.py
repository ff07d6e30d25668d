"""The dataset that one of Data.Train, Data.Eval and Data.Test describes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from ppfleetx.config.errors import ConfigError, DataError
from ppfleetx.data.blended import BlendedDataset, blend_sizes, normalise
from ppfleetx.data.gpt_dataset import GPTDataset, SampleOptions
from ppfleetx.data.indexed import TokenStore
from ppfleetx.data.prefixes import find_prefixes, open_tokens
from ppfleetx.data.split import MODES, split_ranges
from ppfleetx.utils.log import get_logger

if TYPE_CHECKING:
    from ppfleetx.config.data import DatasetConfig
    from ppfleetx.config.sections import RunConfig

Mode = Literal["Train", "Eval", "Test"]


@dataclass(frozen=True)
class CorpusPart:
    """One corpus, the sequences ``[first, last)`` of it that are the split, and its share of the blend."""

    corpus: TokenStore
    first: int
    last: int
    weight: float

    @property
    def num_tokens(self) -> int:
        return int(self.corpus.sizes[self.first : self.last].sum(dtype=np.int64))


def requested_samples(cfg: RunConfig, mode: Mode) -> int:
    """Samples a run asks of a split, which sizes its index maps; Megatron-LM's and FleetX's numbers.

    Train: global batch x max_steps. Eval: global batch x eval_iters x (max_steps // eval_freq + 1).
    Test: global batch x test_iters (10 x eval_iters when not set).
    """
    engine, batch = cfg.Engine, cfg.batch.global_batch_size
    if mode == "Train":
        return batch * engine.max_steps
    if mode == "Eval":
        evaluations = engine.max_steps // engine.eval_freq + 1 if engine.eval_freq else 1
        return batch * engine.eval_iters * evaluations
    return batch * (engine.test_iters or 10 * engine.eval_iters)


def build_dataset(cfg: RunConfig, mode: Mode, *, eod_id: int | None = None) -> GPTDataset | BlendedDataset:
    """Open the corpora of ``Data.<mode>.dataset`` and put their samples in order.

    With ``sampler.drop_last: False``, Eval and Test ask for at most one epoch: no sample is repeated.
    In run mode ``epoch`` Train asks for at most ``num_train_epochs`` epochs.

    Args:
        eod_id: end-of-document token where the section does not name one; the caller's tokenizer knows it.

    Raises:
        ConfigError: there is no such section, or it asks for another kind of dataset.
        DataError: a corpus is missing, damaged or too small.
    """
    section = getattr(cfg.Data, mode)
    if section is None:
        raise ConfigError("this run needs the section, which is not given", key=f"Data.{mode}")
    dataset_cfg = section.dataset
    if dataset_cfg.name != "GPTDataset":
        raise ConfigError(
            "only GPTDataset reads token corpora", key=f"Data.{mode}.dataset.name", value=dataset_cfg.name
        )
    options = SampleOptions(
        sequence_length=dataset_cfg.max_seq_len,
        reset_position_ids=dataset_cfg.reset_position_ids,
        reset_attention_mask=dataset_cfg.reset_attention_mask,
        eod_mask_loss=dataset_cfg.eod_mask_loss,
        eod_id=eod_id if dataset_cfg.eod_id is None else dataset_cfg.eod_id,
        vocab_size=cfg.Model.vocab_size,
    )
    parts = _parts(dataset_cfg, mode)
    num_samples = requested_samples(cfg, mode)
    one_epoch = sum((part.num_tokens - 1) // options.sequence_length for part in parts)
    if mode != "Train" and not section.sampler.drop_last:
        num_samples = min(num_samples, one_epoch)
    if mode == "Train" and cfg.Engine.run_mode == "epoch":
        num_samples = min(num_samples, one_epoch * cfg.Engine.num_train_epochs)
    seed = cfg.Global.seed if dataset_cfg.seed is None else dataset_cfg.seed
    return _order(parts, options, max(1, num_samples), seed, mode, dataset_cfg.cache_dir)


def _parts(dataset_cfg: DatasetConfig, mode: Mode) -> list[CorpusPart]:
    """The corpora of the section; if there are several, with normalised weights."""
    given = dataset_cfg.input_dir
    entries = [given] if isinstance(given, str) else list(given)
    weights = dataset_cfg.weights
    if weights is not None and len(weights) != len(entries):
        key = f"Data.{mode}.dataset.weights"
        raise ConfigError(f"{len(weights)} weights for {len(entries)} entries of input_dir", key=key)
    try:
        groups = [[_part(p, dataset_cfg.split, mode) for p in find_prefixes(entry)] for entry in entries]
    except DataError as error:
        raise DataError(f"Data.{mode}.dataset.input_dir: {error}") from error
    parts = [part for group in groups for part in group]
    if len(parts) == 1:
        return parts
    # A directory's weight is shared by its corpora in proportion to their tokens.
    totals = [max(1, sum(part.num_tokens for part in group)) for group in groups]
    factors = weights if weights is not None else [float(total) for total in totals]
    parts = [
        replace(part, weight=factor * (part.num_tokens / total))
        for group, factor, total in zip(groups, factors, totals, strict=True)
        for part in group
    ]
    return _blend_parts(parts, dataset_cfg, mode)


def _part(prefix: str, split: str | Sequence[float], mode: Mode) -> CorpusPart:
    corpus = open_tokens(prefix)
    first, last = split_ranges(len(corpus), split)[MODES.index(mode)]
    return CorpusPart(corpus, first, last, 1.0)


def _blend_parts(parts: list[CorpusPart], dataset_cfg: DatasetConfig, mode: Mode) -> list[CorpusPart]:
    """Parts with normalised weights, without those too short for a sample that no weight asks for."""
    if dataset_cfg.weights is None:
        get_logger().info(f"{mode}: {len(parts)} corpora, blended in proportion to their tokens")
        small = [part for part in parts if part.num_tokens <= dataset_cfg.max_seq_len]
        if small and len(small) < len(parts):
            names = ", ".join(part.corpus.prefix for part in small)
            get_logger().warning(f"{mode}: left out, since their split is shorter than one sample: {names}")
            parts = [part for part in parts if part.num_tokens > dataset_cfg.max_seq_len]
    parts = [part for part in parts if part.weight > 0] or parts[:1]
    weights = normalise([part.weight for part in parts])
    return [replace(part, weight=weight) for part, weight in zip(parts, weights, strict=True)]


def _order(
    parts: list[CorpusPart],
    options: SampleOptions,
    num_samples: int,
    seed: int,
    mode: Mode,
    cache_dir: str | None,
) -> GPTDataset | BlendedDataset:
    def dataset(part: CorpusPart, size: int) -> GPTDataset:
        return GPTDataset(
            part.corpus,
            part.first,
            part.last,
            options,
            num_samples=size,
            seed=seed,
            name=mode,
            cache_dir=cache_dir,
        )

    if len(parts) == 1:
        return dataset(parts[0], num_samples)
    weights = [part.weight for part in parts]
    total, sizes = blend_sizes(weights, num_samples)
    datasets = [dataset(part, size) for part, size in zip(parts, sizes, strict=True)]
    directory = Path(parts[0].corpus.prefix).parent / "cache" if cache_dir is None else Path(cache_dir)
    return BlendedDataset(datasets, weights, total, directory)
