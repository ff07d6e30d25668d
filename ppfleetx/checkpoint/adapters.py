"""LoRA adapters saved without their base weights: the fingerprint that ties them to the base."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import numpy as np

from ppfleetx.checkpoint.reader import Checkpoint
from ppfleetx.checkpoint.slices import NUMPY_OF_DTYPE
from ppfleetx.config.errors import CheckpointError

BASE = "base"
"""Key of the base's fingerprint in the checkpoints of adapters alone."""

_ROWS, _COLUMNS = 8, 64


def is_beside_base(name: str) -> bool:
    """Whether the parameter of this canonical name belongs to an adapter or a classification head."""
    return ".lora." in name or name.startswith("score.")


def base_fingerprint(checkpoint: Checkpoint, names: Iterable[str]) -> str:
    """Hash of the element type and the first numbers of each tensor, independent of the plan.

    Training changes the first numbers of every tensor, so two models have different hashes. Damage elsewhere
    is found by the checkpoint's own checksums.

    Raises:
        CheckpointError: a tensor is missing or damaged.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(names):
        entry = checkpoint.entry(name)
        sizes = list(entry.shape)
        if entry.vocab_dim is not None and checkpoint.manifest.vocab_size is not None:
            sizes[entry.vocab_dim] = min(sizes[entry.vocab_dim], checkpoint.manifest.vocab_size)
        limits = (_COLUMNS,) if len(sizes) == 1 else (_ROWS, _COLUMNS)
        box = tuple(min(size, limit) for size, limit in zip(sizes, limits, strict=True))
        values = checkpoint.read(name, offset=(0,) * len(box), shape=box)
        assert values.dtype == NUMPY_OF_DTYPE[entry.dtype]
        digest.update(f"{name} {entry.dtype} {box}".encode())
        digest.update(np.ascontiguousarray(values).tobytes())
    return digest.hexdigest()


def check_base(adapters: Checkpoint, fingerprint: str, place: str) -> None:
    """Check that adapters were trained on the weights at ``place``.

    Raises:
        CheckpointError: they were not, or the checkpoint holds a whole model.
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
    """Raise CheckpointError when the checkpoint holds adapters alone."""
    if checkpoint.manifest.fingerprints.get(BASE) is not None:
        raise CheckpointError(
            f"checkpoint {checkpoint.path} holds adapters alone; name the checkpoint of the weights they "
            "belong to with Model.lora.base (or merge both with ppfleetx merge)"
        )
