"""The order of training samples: document, sample and shuffle maps, bit for bit those of Megatron-LM.

A split's sequences, repeated for E epochs and shuffled (`document_index`), form one long stream of tokens.
Sample k is tokens ``[k L, k L + L]`` of the stream: L + 1 of them, so neighbours share one. `sample_index`
says where each sample starts and `shuffle_index` in which order the samples are visited. The rules are those
of Megatron-LM ``core/datasets/gpt_dataset.py``; here no loop runs over samples or documents.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

import numpy as np

ORDER_VERSION = 1
"""Changes when equal arguments would give other maps than before; part of cache names and fingerprints."""

_CHUNK = 1 << 22  # documents handled at a time: bounds the temporary memory to about 100 MB
_SEPARATE_BELOW = 0.80  # the last epoch is shuffled apart when less than this part of its samples is needed


@dataclass(frozen=True)
class EpochPlan:
    """How often a split is read to give the samples asked for.

    Attributes:
        tokens_per_epoch: tokens of the split.
        sequence_length: tokens the model sees per sample (L).
        num_epochs: smallest number of epochs whose tokens suffice (E).
        separate_final_epoch: whether the last epoch is shuffled apart, after all others.
        num_samples: samples that E epochs give, at least as many as asked for.
    """

    tokens_per_epoch: int
    sequence_length: int
    num_epochs: int
    separate_final_epoch: bool

    @property
    def num_samples(self) -> int:
        return (self.num_epochs * self.tokens_per_epoch - 1) // self.sequence_length

    @property
    def num_samples_before_final_epoch(self) -> int:
        """Samples that start in the epochs before the last one."""
        return ((self.num_epochs - 1) * self.tokens_per_epoch - 1) // self.sequence_length


@dataclass(frozen=True)
class IndexMaps:
    """The three arrays; dtypes as in Megatron-LM.

    Attributes:
        document_index: int32 [E * sequences], sequence ids in the order of the token stream.
        sample_index: int32 or int64 [S + 1, 2], (position in `document_index`, token offset) of each start.
        shuffle_index: uint32 or int64 [S], sample visited at each step.
    """

    document_index: np.ndarray
    sample_index: np.ndarray
    shuffle_index: np.ndarray


def plan_epochs(
    tokens_per_epoch: int, sequence_length: int, num_samples: int | None, at_least: int = 0
) -> EpochPlan:
    """Number of epochs for ``num_samples`` samples (None: one epoch) and whether the last is shuffled apart.

    Args:
        tokens_per_epoch: tokens of the split, at least 1.
        sequence_length: tokens the model sees per sample.
        num_samples: samples asked for.
        at_least: samples there must be. The plan is for as many where that for ``num_samples`` holds fewer.
    """
    assert tokens_per_epoch > 0
    assert sequence_length > 0
    if num_samples is None:
        return EpochPlan(tokens_per_epoch, sequence_length, 1, False)
    needed = num_samples * sequence_length + 1
    num_epochs = max(1, -(-needed // tokens_per_epoch))
    plan = EpochPlan(tokens_per_epoch, sequence_length, num_epochs, False)
    if plan.num_samples < at_least:
        return plan_epochs(tokens_per_epoch, sequence_length, at_least)
    if num_epochs == 1:
        return plan
    from_last_epoch = num_samples - plan.num_samples_before_final_epoch
    samples_per_epoch = (tokens_per_epoch - 1) // sequence_length
    separate = from_last_epoch < int(_SEPARATE_BELOW * samples_per_epoch)
    return EpochPlan(tokens_per_epoch, sequence_length, num_epochs, separate)


def maps_bytes(num_sequences: int, plan: EpochPlan) -> int:
    """Bytes of the three arrays for this many sequences; building them needs little more."""
    documents = num_sequences * plan.num_epochs
    position = 4 if documents <= np.iinfo(np.int32).max else 8
    sample = 4 if plan.num_samples < np.iinfo(np.uint32).max - 1 else 8
    return 4 * documents + 2 * position * (plan.num_samples + 1) + sample * plan.num_samples


def build_index_maps(sizes: np.ndarray, first: int, last: int, plan: EpochPlan, seed: int) -> IndexMaps:
    """The maps of sequences ``[first, last)``.

    Args:
        sizes: int32 [N], tokens of every sequence of the corpus.
        plan: from `plan_epochs` with the tokens of that range.
        seed: of the one generator that shuffles documents, then samples.
    """
    # The legacy generator is the definition of the order: only its stream gives Megatron's permutations.
    random = np.random.RandomState(seed)
    # Lengths mapped from an .idx file start at byte 34; gathering from unaligned memory is slow.
    sizes = np.require(sizes, requirements="A")
    document_index = _document_index(first, last, plan, random)
    sample_index = _sample_index(sizes, document_index, plan)
    return IndexMaps(document_index, sample_index, _shuffle_index(plan, random))


def _document_index(first: int, last: int, plan: EpochPlan, random: np.random.RandomState) -> np.ndarray:
    sequences = np.arange(first, last, dtype=np.int32)
    blocks = [plan.num_epochs - 1, 1] if plan.separate_final_epoch else [plan.num_epochs]
    shuffled = []
    for repeats in blocks:
        block = np.tile(sequences, repeats)
        random.shuffle(block)
        shuffled.append(block)
    return shuffled[0] if len(shuffled) == 1 else np.concatenate(shuffled)


def _sample_index(sizes: np.ndarray, document_index: np.ndarray, plan: EpochPlan) -> np.ndarray:
    """Row k: the sequence that holds token k L of the stream, and that token's offset in it.

    Token k L lies in the first sequence whose end is beyond it, which skips empty sequences. Only row 0 is
    (0, 0) even if the first sequence is empty, because nothing has been walked over yet.
    """
    length, num_rows = plan.sequence_length, plan.num_samples + 1
    dtype = np.int32 if document_index.shape[0] <= np.iinfo(np.int32).max else np.int64
    rows = np.empty((num_rows, 2), dtype)
    stream_position, row = 0, 0
    for begin in range(0, document_index.shape[0], _CHUNK):
        ends = np.cumsum(sizes[document_index[begin : begin + _CHUNK]], dtype=np.int64)
        ends += stream_position
        next_row = min(num_rows, -(-int(ends[-1]) // length))
        positions = np.arange(row, next_row, dtype=np.int64) * length
        index = np.searchsorted(ends, positions, side="right")
        starts = np.concatenate(([stream_position], ends[:-1]))
        rows[row:next_row, 0] = index + begin
        rows[row:next_row, 1] = positions - starts[index]
        stream_position, row = int(ends[-1]), next_row
    assert row == num_rows, (row, num_rows)
    rows[0] = 0
    return rows


def _shuffle_index(plan: EpochPlan, random: np.random.RandomState) -> np.ndarray:
    total = plan.num_samples
    dtype = np.uint32 if total < np.iinfo(np.uint32).max - 1 else np.int64
    border = plan.num_samples_before_final_epoch if plan.separate_final_epoch else total
    order = np.arange(total, dtype=dtype)
    random.shuffle(order[:border])
    if border < total:
        random.shuffle(order[border:])
    return order


def order_fingerprint(corpus: str, first: int, last: int, plan: EpochPlan, seed: int) -> str:
    """Hash of all that decides the order of samples, and of nothing else.

    The number of samples asked for counts only through the number of epochs and the separate last one: a
    longer run whose order begins with the same samples has the same fingerprint.
    """
    decisive = {
        "version": ORDER_VERSION,
        "corpus": corpus,
        "sequences": [first, last],
        "sequence_length": plan.sequence_length,
        "num_epochs": plan.num_epochs,
        "separate_final_epoch": plan.separate_final_epoch,
        "seed": seed,
    }
    return hashlib.blake2b(json.dumps(decisive, sort_keys=True).encode(), digest_size=16).hexdigest()
