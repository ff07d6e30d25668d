"""Adapters added to the weights they belong to: a plain checkpoint, that any program reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from ppfleetx.checkpoint.adapters import BASE, base_fingerprint, check_base, is_beside_base
from ppfleetx.checkpoint.directory import open_resolved, resolve_checkpoint
from ppfleetx.checkpoint.few_bits import widened
from ppfleetx.checkpoint.lazy import LazyTensor, cast
from ppfleetx.checkpoint.reader import Checkpoint
from ppfleetx.checkpoint.weights import fitted, network_of, with_vocabulary
from ppfleetx.checkpoint.weights_only import model_section, read_ppfleetx, write_ppfleetx
from ppfleetx.config.errors import CheckpointError
from ppfleetx.config.sections.lora import LoraConfig
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.models.gpt.spec import parameter_shapes
from ppfleetx.utils.files import is_taken


def merge_lora(path: str | Path, output: str | Path, base: str | Path | None = None) -> Path:
    """Write the model that adapters and their base are together; return its step directory.

    ``W + alpha / rank * A B`` is computed in float32 and stored in W's element type; beside quantised
    weights in float32, since the sum is on no grid.

    Args:
        path: checkpoint of a run with `Model.lora`; whatever `Engine.save_load.ckpt_dir` accepts.
        output: a new or empty directory.
        base: the frozen weights, where the checkpoint holds adapters alone; None: those it was trained on.

    Raises:
        CheckpointError: there are no adapters, or they belong to another base.
    """
    output = Path(output)
    if is_taken(output):
        raise CheckpointError(f"--output {output} is there already; name a new or empty directory")
    trained = read_ppfleetx(path, masters=True, few_bits=True)
    model = _model(path)
    tensors = widened({**_frozen(path, model, base), **trained.tensors})
    plain = model.model_copy(update={"lora": None})
    merged = {
        name: tensor if adapters is None else _sum(tensor, *adapters, scale=model.lora.scale)
        for name, tensor, adapters in _with_adapters(tensors, parameter_shapes(plain))
    }
    weights = replace(trained, tensors=merged)
    return write_ppfleetx(weights, fitted(weights, plain), plain, output)


def _model(path: str | Path) -> ModelConfig:
    checkpoint = open_resolved(resolve_checkpoint(path))
    section = model_section(checkpoint.manifest)
    model = network_of(section, f"checkpoint {checkpoint.path}") if section else None
    if model is None or model.lora is None:
        raise CheckpointError(f"checkpoint {checkpoint.path} was not trained with adapters (Model.lora)")
    return model


def _frozen(path: str | Path, model: ModelConfig, base: str | Path | None) -> dict[str, LazyTensor]:
    """The base's tensors, where the checkpoint does not hold them itself."""
    checkpoint = open_resolved(resolve_checkpoint(path))
    if checkpoint.manifest.fingerprints.get(BASE) is None:
        if base is not None:
            raise CheckpointError(f"checkpoint {checkpoint.path} holds the whole model: --base is not needed")
        return {}
    lora: LoraConfig = model.lora
    place = base or lora.base
    source = with_vocabulary(open_resolved(resolve_checkpoint(place)), model.vocab_size)
    scales = {name for name in source.names() if name.endswith(".scale")}  # of quantised weights
    names = [name for name in parameter_shapes(model) if not is_beside_base(name)]
    names += [name for name in sorted(scales) if f"{name.removesuffix('.scale')}.weight" in names]
    check_base(checkpoint, base_fingerprint(source, names), str(place))
    return {name: _lazy(source, name) for name in names}


def _lazy(source: Checkpoint, name: str) -> LazyTensor:
    entry = source.entry(name)
    return LazyTensor(entry.dtype, tuple(entry.shape), lambda: source.read(name))


def _with_adapters(
    tensors: Mapping[str, LazyTensor], names: Iterable[str]
) -> Iterator[tuple[str, LazyTensor, tuple[LazyTensor, LazyTensor] | None]]:
    """(name, tensor, its A and B or None) of each of ``names`` that there is."""
    for name in names:
        if name in tensors:
            linear = name.removesuffix(".weight")
            a, b = (tensors.get(f"{linear}.lora.{letter}") for letter in "ab")
            yield name, tensors[name], None if a is None else (a, b)


def _sum(weight: LazyTensor, a: LazyTensor, b: LazyTensor, scale: float) -> LazyTensor:
    def load() -> np.ndarray:
        product = a.cast("F32").read() @ b.cast("F32").read()
        values = weight.cast("F32").read() + np.float32(scale) * product
        return cast(values, "F32", weight.dtype)

    return LazyTensor(weight.dtype, weight.shape, load)
