"""Weights of a model on their way from one format to another, under our canonical names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ppfleetx.checkpoint.entries import TensorEntry
from ppfleetx.checkpoint.lazy import LazyTensor, cast, finite
from ppfleetx.checkpoint.manifest import Manifest
from ppfleetx.checkpoint.reader import Checkpoint
from ppfleetx.checkpoint.slices import MODEL, NUMPY_OF_DTYPE, Index, TensorSlice
from ppfleetx.config.errors import CheckpointError, ConfigError, shown
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.config.validate import section_of
from ppfleetx.models.gpt.spec import parameter_shapes

# Dimension that counts vocabulary entries, by canonical name.
VOCAB_DIM = {"embedding.word_embeddings.weight": 0, "head.weight": 1, "head.bias": 0}


@dataclass(frozen=True)
class Weights:
    """A model's parameters, read one at a time.

    Attributes:
        place: where they come from; used in messages.
        tensors: by canonical name, in any order. Vocabulary padding may be there or not.
        model: keys of the `Model` section as far as the source tells them.
        vocab_size: true vocabulary; None when the source does not tell it from padding.
        epoch, step: progress, 0 for formats that do not tell.
        source: what to remember of the source (any JSON), kept in the checkpoint's state.
        tokenizer_dir: directory with the tokenizer's files, if there is one.
        generation: keys of the `Generation` section that the source says.
        notes: what to say about how the source was read, one sentence each.
    """

    place: str
    tensors: Mapping[str, LazyTensor]
    model: Mapping[str, Any] = field(default_factory=dict)
    vocab_size: int | None = None
    epoch: int = 0
    step: int = 0
    source: Mapping[str, Any] = field(default_factory=dict)
    tokenizer_dir: Path | None = None
    generation: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def cast(self, dtype: str | None) -> Weights:
        """All tensors in one element type (a key of NUMPY_OF_DTYPE); None leaves them as they are."""
        if dtype is None:
            return self
        return self.with_tensors({name: tensor.cast(dtype) for name, tensor in self.tensors.items()})

    def finite(self) -> Weights:
        """The same; to read a tensor with a number that is NaN or infinite raises CheckpointError."""
        return self.with_tensors(
            {name: finite(tensor, name, self.place) for name, tensor in self.tensors.items()}
        )

    def with_tensors(self, tensors: Mapping[str, LazyTensor]) -> Weights:
        """The same with other tensors."""
        return replace(self, tensors=tensors)

    def with_tokenizer(self, directory: Path) -> Weights:
        """The same with the tokenizer of another directory."""
        return replace(self, tokenizer_dir=directory)


def network_of(told: Mapping[str, Any], place: str) -> ModelConfig:
    """The network that the keys of a `Model` section describe, as far as a source of weights told them.

    Raises:
        CheckpointError: there is no such network; names `place`.
    """
    try:
        return section_of(ModelConfig, dict(told))
    except ConfigError as error:
        raise CheckpointError(f"{place} describes no valid network: {error}") from error


def fitted(weights: Weights, model: ModelConfig) -> dict[str, LazyTensor]:
    """The parameters `model` has, in its order and shapes; vocabulary padding is made or cut to fit.

    Raises:
        CheckpointError: tensors are missing, left over or of another shape.
    """
    if model.num_layers > len(weights.tensors):  # and what follows takes time and memory for each layer
        raise CheckpointError(
            f"{weights.place} has {len(weights.tensors)} tensors, the Model section {model.num_layers} layers"
        )
    shapes = parameter_shapes(model)
    missing = [name for name in shapes if name not in weights.tensors]
    extra = [name for name in weights.tensors if name not in shapes]
    if missing or extra:
        parts = [f"{_some(missing)} missing"] * bool(missing) + [f"{_some(extra)} left over"] * bool(extra)
        raise CheckpointError(f"{weights.place} does not fit the Model section: {' and '.join(parts)}")
    return {
        name: _padded(weights.tensors[name], name, shape, model, weights.place)
        for name, shape in shapes.items()
    }


def slices_of(tensors: Mapping[str, LazyTensor]) -> Iterator[TensorSlice]:
    """One whole slice per parameter, read when the writer comes to it."""
    for name, tensor in tensors.items():
        yield TensorSlice(
            name,
            MODEL,
            tensor.dtype,
            tensor.shape,
            (0,) * len(tensor.shape),
            tensor.shape,
            tensor.read,
            vocab_dim=VOCAB_DIM.get(name),
        )


def in_stored_types(pieces: Sequence[TensorSlice], stored: Mapping[str, str]) -> list[TensorSlice]:
    """``pieces`` in the element types that their tensors were loaded from, if that loses no bit of any; else
    as they are.

    Args:
        pieces: of a model in memory.
        stored: element type by name.
    """
    made = []
    for piece in pieces:
        wanted = stored.get(piece.name, piece.dtype)
        if piece.dtype != "F32" or wanted not in ("F16", "BF16"):
            made.append(piece)
            continue
        values = piece.array()
        if not np.array_equal(cast(cast(values, "F32", wanted), wanted, "F32"), values):
            return list(pieces)
        made.append(replace(piece, dtype=wanted, data=_cast_when_read(piece, wanted), is_live=False))
    return made


def _cast_when_read(piece: TensorSlice, wanted: str) -> Callable[[], np.ndarray]:
    return lambda: cast(piece.array(), piece.dtype, wanted)


class ForeignCheckpoint(Checkpoint):
    """Weights of another program that can be loaded as if they were a checkpoint of ours.

    There is no optimizer, no progress and no checksum in it.
    """

    def __init__(self, path: Path, weights: Weights) -> None:
        tensors = {}
        for name, tensor in weights.tensors.items():
            entry = TensorEntry(name, MODEL, "", tensor.dtype, tensor.shape, (), VOCAB_DIM.get(name))
            tensors[entry.key] = entry
        manifest = Manifest(
            step=weights.step,
            epoch=weights.epoch,
            files={},
            tensors=tensors,
            vocab_size=weights.vocab_size,
        )
        super().__init__(path, manifest, saved_at_ns=0)
        self._weights = weights.finite()

    def _fill(self, entry: TensorEntry, offset: Index, result: np.ndarray) -> None:
        box = tuple(slice(o, o + n) for o, n in zip(offset, result.shape, strict=True))
        result[...] = self._weights.tensors[entry.name].read()[box]

    def damage(self) -> Iterator[str]:
        """Reads every tensor; the formats read here have no checksums of their own to compare."""
        for name, tensor in self._weights.tensors.items():
            try:
                tensor.read()
            except CheckpointError as error:
                yield f"{MODEL} {name}: {error}"


def with_vocabulary(checkpoint: Checkpoint, vocab_size: int) -> Checkpoint:
    """The checkpoint, told the true size of a vocabulary that it does not know itself."""
    if checkpoint.manifest.vocab_size is None:
        checkpoint.manifest = replace(checkpoint.manifest, vocab_size=vocab_size)
    return checkpoint


def _padded(tensor: LazyTensor, name: str, shape: Index, model: ModelConfig, place: str) -> LazyTensor:
    if tensor.shape == shape:
        return tensor
    dim = VOCAB_DIM.get(name)
    true_shape = tuple(model.vocab_size if axis == dim else n for axis, n in enumerate(shape))
    fits = len(tensor.shape) == len(shape) and all(
        (have >= want) if axis == dim else (have == want)
        for axis, (have, want) in enumerate(zip(tensor.shape, true_shape, strict=True))
    )
    if dim is None or not fits:
        raise CheckpointError(
            f"{place}: {name} has shape {list(tensor.shape)}, the Model section asks for {list(true_shape)}"
        )

    def load() -> np.ndarray:
        true = tuple(slice(n) for n in true_shape)
        values = np.zeros(shape, NUMPY_OF_DTYPE[tensor.dtype])
        values[true] = tensor.read()[true]
        return values

    return LazyTensor(tensor.dtype, shape, load)


def _some(names: list[str]) -> str:
    first = ", ".join(name if len(name) <= 200 else shown(name) for name in names[:4])
    return f"{first} and {len(names) - 4} more" if len(names) > 4 else first
