"""A dataset of language modeling samples, cut from one split (Train, Eval or Test) of a tokenized corpus. The
samples are cut and ordered as in Megatron-LM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from ppfleetx.config.errors import DataError
from ppfleetx.config.message_text import counted
from ppfleetx.config.sections.data import MODES, split_shares
from ppfleetx.data.index_map import (
    IndexMaps,
    build_index_maps,
    load_or_build,
    maps_bytes,
    order_fingerprint,
    plan_epochs,
)
from ppfleetx.data.indexed_dataset import TokenStore


def split_ranges(num_sequences: int, split: str | Sequence[float]) -> list[tuple[int, int]]:
    """Divide the sequences of a corpus among Train, Eval and Test in proportion to ``split``, as Megatron-LM
    does. Returns three ranges ``[first, last)`` of sequences, any of which can be empty."""
    shares = split_shares(split)
    weights = np.array(shares) / np.sum(shares)
    borders = [0.0]
    for weight in [*weights.tolist(), *[0.0] * (len(MODES) - len(shares))]:
        borders.append(borders[-1] + weight)
    # round() rounds half to even, as in Megatron-LM.
    rounded = [round(border * float(num_sequences)) for border in borders]
    return list(pairwise(rounded))


Sample = dict[str, np.ndarray]

PADDING = -1
"""Index of a padding sample, which fills up a batch and has no loss."""

# More epochs than this help little (Muennighoff et al. 2023, "Scaling Data-Constrained Language Models").
_MANY_EPOCHS = 4


@dataclass(frozen=True)
class SampleOptions:
    """Options for cutting and masking samples.

    Attributes:
        sequence_length: number of input tokens of a sample.
        reset_position_ids: whether positions restart at 0 after each end-of-document token.
        reset_attention_mask: whether a token attends only to its own document.
        eod_mask_loss: whether the loss leaves out positions whose input is the end-of-document token.
        eod_id: id of the end-of-document token, which the three options above require.
        vocab_size: vocabulary size without padding, to check token ids against. None: ids are not checked.
    """

    sequence_length: int
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False
    eod_id: int | None = None
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        flags = [
            name
            for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
            if getattr(self, name)
        ]
        if flags and self.eod_id is None:
            raise DataError(f"{', '.join(flags)} need the end-of-document id: set eod_id or Data.tokenizer")


def index_directory(corpus: TokenStore, cache_dir: str | Path | None) -> Path:
    """Return the directory where index maps are cached: ``cache_dir`` or, if it is None, the directory
    ``cache`` beside the corpus."""
    return Path(corpus.prefix).parent / "cache" if cache_dir is None else Path(cache_dir)


class GPTDataset:
    """Samples of ``options.sequence_length`` tokens, cut from the sequences ``[first, last)`` of a corpus, in
    shuffled order. Raises DataError if these sequences have too few tokens for one sample.

    Args:
        num_samples: number of samples wanted. None: one epoch.
        at_least: minimum number of samples. If the epochs for ``num_samples`` have fewer, more epochs are
            used. Ignored if ``num_samples`` is None.
        name: name of the split (Train, Eval or Test), for messages.
        cache_dir: directory where the shuffled order is cached. None: ``cache`` beside the corpus.
    """

    def __init__(
        self,
        corpus: TokenStore,
        first: int,
        last: int,
        options: SampleOptions,
        *,
        num_samples: int | None,
        seed: int,
        at_least: int = 0,
        name: str = "Train",
        cache_dir: str | Path | None = None,
    ) -> None:
        self.corpus, self.options, self.name = corpus, options, name
        self.first, self.last = first, last
        self.tokens_per_epoch = int(corpus.sizes[first:last].sum(dtype=np.int64))
        self._check_size(num_samples)
        self.plan = plan_epochs(self.tokens_per_epoch, options.sequence_length, num_samples, at_least)
        self.num_requested = self.plan.num_samples if num_samples is None else max(num_samples, at_least)
        self.fingerprint = order_fingerprint(corpus.fingerprint, first, last, self.plan, seed)
        self._maps = self._load_maps(index_directory(corpus, cache_dir), seed)

    def _check_size(self, num_samples: int | None) -> None:
        needed = self.options.sequence_length + 1
        if self.tokens_per_epoch >= needed:
            return
        documents, tokens = len(self.corpus), self.corpus.num_tokens
        wish = "one epoch" if num_samples is None else counted(num_samples, "sample", ",")
        what = f"has {counted(self.tokens_per_epoch, 'token', ',')}" if self.tokens_per_epoch else "is empty"
        raise DataError(
            f"{self.corpus.prefix}: the {self.name} split {what}: it takes documents [{self.first:,}, "
            f"{self.last:,}) of {documents:,} ({tokens:,} tokens), and one sample needs {needed:,} tokens "
            f"({wish} asked for). Give {self.name} a larger share of `split`, more text, or a shorter "
            "max_seq_len."
        )

    def _load_maps(self, directory: Path, seed: int) -> IndexMaps:
        arrays = load_or_build(
            directory,
            f"gpt_{self.fingerprint}",
            ("document_index", "sample_index", "shuffle_index"),
            lambda: vars(build_index_maps(self.corpus.sizes, self.first, self.last, self.plan, seed)),
            num_bytes=maps_bytes(self.last - self.first, self.plan),
        )
        return IndexMaps(**arrays)

    def __len__(self) -> int:
        return self.plan.num_samples

    @property
    def samples_per_epoch(self) -> float:
        return self.tokens_per_epoch / self.options.sequence_length

    def __getitem__(self, index: int) -> Sample:
        """Return sample ``index`` of the shuffled order. The index `PADDING` gives a sample whose loss mask
        is 0. Raises DataError for a token id outside the vocabulary.

        The arrays are ``tokens``, ``labels``, ``position_ids`` int64 [s], ``loss_mask`` float32 [s],
        ``sample_ids`` int64 []. With ``reset_attention_mask`` there is also ``document_start`` int32 [s], the
        first position that each position may attend to.
        """
        window = self._window(max(index, 0))
        sample = make_sample(window, self.options)
        sample["sample_ids"] = np.array(index, np.int64)
        if index == PADDING:
            sample["loss_mask"][:] = 0.0
        return sample

    def _pieces(self, index: int) -> list[tuple[int, int, int]]:
        """Return which tokens make up sample ``index``, as a list of (sequence, start, end). Each item stands
        for tokens ``[start, end)`` of one sequence."""
        row = int(self._maps.shuffle_index[index])
        (position, offset), (last_position, last_offset) = self._maps.sample_index[row : row + 2].tolist()
        sequences = self._maps.document_index[position : last_position + 1].tolist()
        ends = [int(self.corpus.sizes[sequence]) for sequence in sequences]
        # A sample includes the first token of the next sample, as the label of its last position.
        ends[-1] = last_offset + 1
        starts = [offset] + [0] * (len(sequences) - 1)
        return list(zip(sequences, starts, ends, strict=True))

    def _window(self, index: int) -> np.ndarray:
        pieces = [
            self.corpus.get(sequence, start, end - start) for sequence, start, end in self._pieces(index)
        ]
        window = (pieces[0] if len(pieces) == 1 else np.concatenate(pieces)).astype(np.int64)
        vocab_size = self.options.vocab_size
        if vocab_size is not None and (window.max() >= vocab_size or window.min() < 0):
            self._refuse_ids(index)
        return window

    def _refuse_ids(self, index: int) -> None:
        for sequence, start, end in self._pieces(index):
            tokens = self.corpus.get(sequence, start, end - start)
            wrong = np.flatnonzero((tokens >= self.options.vocab_size) | (tokens < 0))
            if wrong.size:
                raise DataError(
                    f"{self.corpus.prefix}: document {sequence} holds id {int(tokens[wrong[0]])} at token "
                    f"{start + int(wrong[0])}, but Model.vocab_size is {self.options.vocab_size}; was the "
                    "corpus made with another tokenizer?"
                )

    def describe(self) -> str:
        length = self.options.sequence_length
        epochs = self.num_requested / self.samples_per_epoch
        text = (
            f"{self.corpus.prefix}: {counted(self.last - self.first, 'document', ',')}, "
            f"{counted(self.tokens_per_epoch, 'token', ',')}; {counted(self.num_requested, 'sample', ',')} "
            f"of {counted(length, 'token', ',')} = {epochs:.2f} epochs"
        )
        if epochs > _MANY_EPOCHS:
            text += f" (WARNING: every document is read {epochs:.1f} times)"
        return text


def make_sample(window: np.ndarray, options: SampleOptions) -> Sample:
    """Make the model's inputs, labels and masks from a window of L + 1 tokens. The first L are the inputs,
    and the last L the labels."""
    tokens, labels = window[:-1], window[1:]
    positions = np.arange(tokens.shape[0], dtype=np.int64)
    sample = {
        "tokens": tokens,
        "labels": labels,
        "loss_mask": np.ones(tokens.shape[0], np.float32),
        "position_ids": positions,
    }
    if options.eod_mask_loss:
        sample["loss_mask"][tokens == options.eod_id] = 0.0
    if options.reset_position_ids or options.reset_attention_mask:
        start = np.zeros_like(positions)
        # An end-of-document token belongs to the document that it ends.
        start[1:] = np.where(tokens[:-1] == options.eod_id, positions[1:], 0)
        np.maximum.accumulate(start, out=start)
        if options.reset_position_ids:
            sample["position_ids"] = positions - start
        if options.reset_attention_mask:
            sample["document_start"] = start.astype(np.int32)
    return sample
