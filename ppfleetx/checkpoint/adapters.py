"""LoRA adapters saved without their base weights: check that they fit a base, and merge them into it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ppfleetx.checkpoint.config_and_tokenizer import TOKENIZER_DIR
from ppfleetx.checkpoint.lazy_tensors import LazyTensor, cast
from ppfleetx.checkpoint.model_only import model_section, read_ppfleetx, write_ppfleetx
from ppfleetx.checkpoint.reader import Checkpoint
from ppfleetx.checkpoint.resolve_checkpoint import open_named
from ppfleetx.checkpoint.slices import NUMPY_OF_DTYPE, SIXTEEN_BIT
from ppfleetx.checkpoint.weights import fitted, lazy, network_of, with_vocabulary
from ppfleetx.config.errors import CheckpointError, naming
from ppfleetx.config.sections.lora import LoraConfig
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.data.tokenizer.json_files import CHAT_TEMPLATE
from ppfleetx.models.gpt.spec import parameter_shapes
from ppfleetx.utils.output_files import is_taken, refuse_unwritable

BASE = "base"
"""Key of the base weights' hash in a manifest's ``fingerprints``. Only checkpoints that contain adapters
without base weights have it."""

_ROWS, _COLUMNS = 8, 64


def is_adapter_or_head(name: str) -> bool:
    return ".lora." in name or name.startswith("score.")


def base_fingerprint(checkpoint: Checkpoint, names: Iterable[str], *, widened: bool = False) -> str:
    """Return a hash of base weights, to check whether LoRA adapters were trained on these weights. The hash
    covers the element type and the first few numbers of each tensor in ``names``, and does not depend on the
    parallel plan that saved the checkpoint. With ``widened``, 16-bit numbers are converted to float32 first.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(names):
        entry = checkpoint.entry(name)
        sizes = list(entry.shape)
        if entry.vocab_dim is not None and checkpoint.manifest.vocab_size is not None:
            sizes[entry.vocab_dim] = min(sizes[entry.vocab_dim], checkpoint.manifest.vocab_size)
        # Training changes the first few numbers of each tensor, so these are enough.
        limits = (_COLUMNS,) if len(sizes) == 1 else (_ROWS, _COLUMNS)
        box = tuple(min(size, limit) for size, limit in zip(sizes, limits, strict=True))
        values = checkpoint.read(name, offset=(0,) * len(box), shape=box)
        assert values.dtype == NUMPY_OF_DTYPE[entry.dtype]
        dtype = entry.dtype
        if widened and dtype in SIXTEEN_BIT:
            values, dtype = cast(values, dtype, "F32"), "F32"
        digest.update(f"{name} {dtype} {box}".encode())
        digest.update(np.ascontiguousarray(values).tobytes())
    return digest.hexdigest()


def check_base(adapters: Checkpoint, fingerprint: str, place: str) -> None:
    """Raise CheckpointError unless ``adapters`` were trained on the base weights at ``place``.

    Args:
        fingerprint: the :func:`base_fingerprint` of the weights at ``place``.
    """
    trained_on = adapters.manifest.fingerprints.get(BASE)
    if trained_on is None:
        raise CheckpointError(
            f"checkpoint {adapters.path} holds a whole model, not adapters alone: Model.lora.base ({place}) "
            "is not needed; set it to null"
        )
    if trained_on != fingerprint:
        config = adapters.manifest.config
        config = config if isinstance(config, Mapping) else {}
        was = ((config.get("Model") or {}).get("lora") or {}).get("base")
        raise CheckpointError(
            f"the adapters of {adapters.path} were trained on another base (then {was}) than Model.lora.base "
            f"= {place}: fingerprint {trained_on}, not {fingerprint}"
        )


def refuse_without_base(checkpoint: Checkpoint) -> None:
    if checkpoint.manifest.fingerprints.get(BASE) is not None:
        raise CheckpointError(
            f"checkpoint {checkpoint.path} holds adapters alone; name the checkpoint of the weights they "
            "belong to with Model.lora.base (or merge both with ppfleetx merge)"
        )


_FEATURES_IN_A_ROW = {"I8": 1, "U8": 2}
"""Input features per row of a quantized matrix, by element type."""


def merge_lora(path: str | Path, output: str | Path, base: str | Path | None = None) -> Path:
    """Merge LoRA adapters into their base weights, and write the merged model. Returns its step directory.

    Quantized base weights become float32. Other base weights keep their element type.

    Args:
        path: the checkpoint with the adapters.
        output: a new or empty directory.
        base: the checkpoint with the base weights, allowed only if ``path`` contains only adapters; None: the
            value of ``Model.lora.base``.

    Raises CheckpointError if there are no adapters, or they were trained on another base.
    """
    output = Path(output)
    if is_taken(output):
        raise CheckpointError(f"--output {output} exists already; name a new or empty directory")
    refuse_unwritable(output, "--output")
    with naming("CHECKPOINT", path):
        trained = read_ppfleetx(path, masters=True, few_bits=True)
    checkpoint = open_named(path)
    model = _model(checkpoint)
    tensors = _dequantized({**_missing_base_weights(checkpoint, model, base), **trained.tensors})
    plain = model.model_copy(update={"lora": None})
    merged = {
        name: tensor if adapters is None else _sum(tensor, *adapters, scale=model.lora.scale)
        for name, tensor, adapters in _with_adapters(tensors, parameter_shapes(plain))
    }
    weights = replace(trained, tensors=merged)
    return write_ppfleetx(weights, fitted(weights, plain), plain, output)


@dataclass(frozen=True)
class TrainedAdapters:
    """LoRA adapters: for each adapted layer X, float32 ``X.lora.a [in, rank]`` and
    ``X.lora.b [rank, out]``. ``template`` is the chat template that they were trained with, if the checkpoint
    has one in a file of its own."""

    lora: LoraConfig
    tensors: Mapping[str, np.ndarray]
    template: str | None = None


def read_adapters(path: str | Path, base: str | Path) -> TrainedAdapters:
    """Read the LoRA adapters in the checkpoint at ``path``. Raises CheckpointError if the checkpoint has no
    adapters or has a classification head. Also raises CheckpointError if the adapters were trained with
    another tokenizer, or on other weights than those at ``base``."""
    checkpoint = open_named(path)
    model = _model(checkpoint)
    trained = read_ppfleetx(path, masters=True, few_bits=True)
    names = [name for name in parameter_shapes(model) if is_adapter_or_head(name)]
    if heads := [name for name in names if ".lora." not in name]:
        raise CheckpointError(f"checkpoint {checkpoint.path} has a classification head, {heads[0]}")
    source = with_vocabulary(open_named(base), model.vocab_size)
    frozen = _frozen_names(source, model)
    fingerprints = checkpoint.manifest.fingerprints
    # A checkpoint of the whole model contains the base weights that the adapters were trained on. Training on
    # a CPU has converted 16-bit base weights to float32.
    is_whole = BASE not in fingerprints
    trained_over = base_fingerprint(checkpoint, frozen, widened=True) if is_whole else fingerprints[BASE]
    if trained_over != base_fingerprint(source, frozen, widened=is_whole):
        raise CheckpointError(
            f"the adapters of {checkpoint.path} were trained over other weights than those of {base}, or "
            "over the same in another element type"
        )
    tokenizers = {fingerprints.get("tokenizer"), source.manifest.fingerprints.get("tokenizer")} - {None}
    if len(tokenizers) > 1:
        raise CheckpointError(f"the adapters of {checkpoint.path} were trained with another tokenizer")
    tensors = {name: trained.tensors[name].cast("F32").read() for name in names}
    template = checkpoint.document(f"{TOKENIZER_DIR}/{CHAT_TEMPLATE}")
    return TrainedAdapters(
        model.lora, tensors, None if template is None else template.decode("utf-8", "replace")
    )


def _frozen_names(source: Checkpoint, model: ModelConfig) -> list[str]:
    """Return the names of the base weights in ``source``, including quantization scales."""
    scales = {name for name in source.names() if name.endswith(".scale")}
    names = [name for name in parameter_shapes(model) if not is_adapter_or_head(name)]
    return names + [name for name in sorted(scales) if f"{name.removesuffix('.scale')}.weight" in names]


def _model(checkpoint: Checkpoint) -> ModelConfig:
    section = model_section(checkpoint.manifest)
    model = network_of(section, f"checkpoint {checkpoint.path}") if section else None
    if model is None or model.lora is None:
        raise CheckpointError(f"checkpoint {checkpoint.path} was not trained with adapters (Model.lora)")
    return model


def _missing_base_weights(
    checkpoint: Checkpoint, model: ModelConfig, base: str | Path | None
) -> dict[str, LazyTensor]:
    """Return the base weights that ``checkpoint`` lacks; empty if it contains the whole model. The weights
    are read lazily from ``base`` or, by default, from ``Model.lora.base``."""
    if checkpoint.manifest.fingerprints.get(BASE) is None:
        if base is not None:
            raise CheckpointError(f"checkpoint {checkpoint.path} holds the whole model: --base is not needed")
        return {}
    lora: LoraConfig = model.lora
    place = base or lora.base
    with naming("--base" if base else "Model.lora.base", place):
        source = with_vocabulary(open_named(place), model.vocab_size)
    names = _frozen_names(source, model)
    check_base(checkpoint, base_fingerprint(source, names), str(place))
    return {name: lazy(source, name) for name in names}


def _with_adapters(
    tensors: Mapping[str, LazyTensor], names: Iterable[str]
) -> Iterator[tuple[str, LazyTensor, tuple[LazyTensor, LazyTensor] | None]]:
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


def _dequantized(tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Return ``tensors`` with quantized weights (see :mod:`ppfleetx.nn.quantized`) replaced by float32
    weights, which are dequantized when they are read."""
    scales = {
        name: f"{name.removesuffix('.weight')}.scale"
        for name, tensor in tensors.items()
        if tensor.dtype in _FEATURES_IN_A_ROW
    }
    return {
        name: _wide(tensor, tensors[scales[name]]) if name in scales else tensor
        for name, tensor in tensors.items()
        if name not in scales.values()
    }


def _wide(stored: LazyTensor, scale: LazyTensor) -> LazyTensor:
    *experts, rows, columns = stored.shape
    shape = (*experts, rows * _FEATURES_IN_A_ROW[stored.dtype], columns)

    def load() -> np.ndarray:
        levels = stored.read()
        if stored.dtype == "U8":
            halves = np.stack([levels & 15, levels >> 4], axis=-2).reshape(shape).astype(np.int8)
            levels = np.where(halves > 7, halves - 16, halves)
        values, steps = levels.astype(np.float32), scale.read().astype(np.float32)
        if steps.shape[-1] != columns and scale.dtype == "F16":
            grouped = values.reshape(rows, -1, 2 * columns // steps.shape[-1])
            return (grouped * steps[:, 0::2, np.newaxis] + steps[:, 1::2, np.newaxis]).reshape(shape)
        if steps.shape[-1] != columns:
            return values * steps
        offsets = np.float32(0)
        if scale.dtype == "F16":
            steps, offsets = steps[..., 0::2, :], steps[..., 1::2, np.newaxis, :]
        grouped = values.reshape(*steps.shape[:-1], -1, columns)
        return (grouped * steps[..., np.newaxis, :] + offsets).reshape(shape)

    return LazyTensor("F32", shape, load)
