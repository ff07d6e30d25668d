"""Weights of a model, read lazily from any checkpoint format, under ppfleetx's parameter names."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from ppfleetx.checkpoint.lazy_tensors import LazyTensor, cast, finite
from ppfleetx.checkpoint.manifest import Manifest, TensorEntry
from ppfleetx.checkpoint.reader import Checkpoint
from ppfleetx.checkpoint.slices import MODEL, NUMPY_OF_DTYPE, SIXTEEN_BIT, Index, TensorSlice
from ppfleetx.config.errors import CheckpointError, ConfigError, shown
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.config.validate import section_of
from ppfleetx.models.gpt.spec import parameter_shapes
from ppfleetx.utils.progress_bar import ProgressBar

_VOCABULARY = 97  # a size that no other dimension of the model below has


@cache
def vocab_dims() -> dict[str, int]:
    """Return {parameter name: dimension that counts vocabulary entries} for the embedding and the head."""
    sizes = {"vocab_size": _VOCABULARY, "hidden_size": 2, "num_layers": 1, "num_attention_heads": 1}
    model = ModelConfig(**sizes, vocab_size_divisible_unit=1, tie_word_embeddings=False, add_head_bias=True)
    shapes = parameter_shapes(model)
    return {name: shape.index(_VOCABULARY) for name, shape in shapes.items() if _VOCABULARY in shape}


@dataclass(frozen=True)
class Weights:
    """The weights of a model, read lazily from a source checkpoint of any format, and what the source says
    about the model.

    Attributes:
        place: where the weights come from, for messages.
        tensors: the weights by ppfleetx's parameter names, in any order, with or without vocabulary padding.
        model, generation: keys of the `Model` and `Generation` sections that the source determines, with
            their values.
        vocab_size: size of the vocabulary without padding; None if unknown.
        epoch, step: progress of the training; 0 if unknown.
        source: a description of the source, such as its format, as JSON values. A checkpoint that is written
            from these weights stores it in its state.
        tokenizer_dir: the directory of the tokenizer files; None if there are none.
        notes: warnings about how the source was read, one sentence each.
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

    def cast(self, dtype: str | None, keep: Collection[str] = ()) -> Weights:
        """Return these weights, lazily converted to the element type ``dtype``, except the tensors named in
        ``keep``. If ``dtype`` is None, nothing is converted."""
        if dtype is None:
            return self
        return self.with_tensors(
            {name: one if name in keep else one.cast(dtype) for name, one in self.tensors.items()}
        )

    def finite(self) -> Weights:
        """Return these weights with a check: reading a tensor that has a NaN or an infinity raises
        CheckpointError."""
        return self.with_tensors(
            {name: finite(tensor, name, self.place) for name, tensor in self.tensors.items()}
        )

    def with_tensors(self, tensors: Mapping[str, LazyTensor]) -> Weights:
        return replace(self, tensors=tensors)

    def with_tokenizer(self, directory: Path) -> Weights:
        return replace(self, tokenizer_dir=directory)


def network_of(keys: Mapping[str, Any], place: str) -> ModelConfig:
    """Build a `Model` section from ``keys``. Raises CheckpointError if they do not describe a valid network.

    Args:
        place: the source of the keys, for messages.
    """
    try:
        return section_of(ModelConfig, dict(keys))
    except ConfigError as error:
        raise CheckpointError(f"{place} describes no valid network: {error}") from error


def fitted(weights: Weights, model: ModelConfig) -> dict[str, LazyTensor]:
    """Return the tensors of ``weights`` in the order of the parameters of ``model``. Their vocabulary padding
    is cut, or extended with 0, to the size in ``model``. Raises CheckpointError if a tensor is missing or
    unknown, or if its shape differs in more than the padding."""
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


def lazy(checkpoint: Checkpoint, name: str, kind: str = MODEL, state: str = "") -> LazyTensor:
    entry = checkpoint.entry(name, kind, state)
    return LazyTensor(entry.dtype, tuple(entry.shape), lambda: checkpoint.read(name, kind, state))


def slices_of(tensors: Mapping[str, LazyTensor]) -> Iterator[TensorSlice]:
    """Yield each tensor as one slice to save. Its data is read only when the slice is written."""
    for name, tensor in tensors.items():
        yield TensorSlice(
            name,
            MODEL,
            tensor.dtype,
            tensor.shape,
            (0,) * len(tensor.shape),
            tensor.shape,
            tensor.read,
            vocab_dim=vocab_dims().get(name),
        )


@contextmanager
def shown_reading(tensors: Mapping[str, LazyTensor], description: str) -> Iterator[dict[str, LazyTensor]]:
    """Context manager that shows a progress bar. It yields the tensors, wrapped so that the bar advances
    when one is read."""
    total = sum(tensor.num_bytes for tensor in tensors.values())
    with ProgressBar(description, total=total / 1e6, unit="MB") as bar:
        yield {name: _counted(tensor, bar) for name, tensor in tensors.items()}


def _counted(tensor: LazyTensor, bar: ProgressBar) -> LazyTensor:
    def load() -> np.ndarray:
        values = tensor.load()
        bar.advance(tensor.num_bytes / 1e6)
        return values

    return LazyTensor(tensor.dtype, tensor.shape, load)


def in_stored_types(pieces: Sequence[TensorSlice], stored: Mapping[str, str]) -> list[TensorSlice]:
    """Convert a model's slices from float32 back to the 16-bit element types in which the model was stored.
    If this would change any element, all slices are returned unchanged.

    Args:
        stored: the element types in which the model was stored, by parameter name.
    """
    made = []
    for piece in pieces:
        wanted = stored.get(piece.name, piece.dtype)
        if piece.dtype != "F32" or wanted not in SIXTEEN_BIT:
            made.append(piece)
            continue
        values = piece.array()
        if not np.array_equal(cast(cast(values, "F32", wanted), wanted, "F32"), values):
            return list(pieces)
        made.append(
            replace(piece, dtype=wanted, data=partial(_cast, piece, wanted), changes_with_update=False)
        )
    return made


def _cast(piece: TensorSlice, wanted: str) -> np.ndarray:
    return cast(piece.array(), piece.dtype, wanted)


class ForeignCheckpoint(Checkpoint):
    """Another program's weights with the interface of a checkpoint, without optimizer state and checksums."""

    def __init__(self, path: Path, weights: Weights) -> None:
        tensors = {}
        for name, tensor in weights.tensors.items():
            entry = TensorEntry(name, MODEL, "", tensor.dtype, tensor.shape, (), vocab_dims().get(name))
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
        """Read every tensor, and yield one sentence for each that cannot be read."""
        for name, tensor in self._weights.tensors.items():
            try:
                tensor.read()
            except CheckpointError as error:
                yield f"{MODEL} {name}: {error}"


def with_vocabulary(checkpoint: Checkpoint, vocab_size: int) -> Checkpoint:
    """Set the vocabulary size in the manifest of ``checkpoint`` if it is missing there, and return the
    checkpoint."""
    if checkpoint.manifest.vocab_size is None:
        checkpoint.manifest = replace(checkpoint.manifest, vocab_size=vocab_size)
    return checkpoint


def _padded(tensor: LazyTensor, name: str, shape: Index, model: ModelConfig, place: str) -> LazyTensor:
    if tensor.shape == shape:
        return tensor
    dim = vocab_dims().get(name)
    true_shape = tuple(model.vocab_size if axis == dim else n for axis, n in enumerate(shape))
    fits = len(tensor.shape) == len(shape) and all(
        (have >= want) if axis == dim else (have == want)
        for axis, (have, want) in enumerate(zip(tensor.shape, true_shape, strict=True))
    )
    if dim is None or not fits:
        raise CheckpointError(
            f"{place}: {name} has shape {list(tensor.shape)}, the Model section needs {list(true_shape)}"
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
