"""Copy a checkpoint, with its tensors joined or split for another parallel plan."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from math import prod
from pathlib import Path

import yaml

from ppfleetx.checkpoint.config_and_tokenizer import TOKENIZER_DIR, copy_tokenizer, documents_in
from ppfleetx.checkpoint.manager import save_checkpoint
from ppfleetx.checkpoint.manifest import Manifest, TensorEntry, rank_directory
from ppfleetx.checkpoint.model_only import find_tokenizer_dir
from ppfleetx.checkpoint.reader import Checkpoint
from ppfleetx.checkpoint.resolve_checkpoint import open_named
from ppfleetx.checkpoint.slices import MODEL, TensorSlice
from ppfleetx.checkpoint.writer import commit, saving, write_rank
from ppfleetx.config.errors import CheckpointError
from ppfleetx.config.loader import CONFIG_FILE
from ppfleetx.config.parallel_plan import ParallelPlan
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.models.gpt.spec import parameter_specs
from ppfleetx.nn.param_spec import Shard
from ppfleetx.utils.output_files import atomic_write

_NO_LIMIT = 1 << 62
_LAYER_NUMBER = re.compile(r"\.\d+\.")


def merge(path: str | Path, output: str | Path) -> Path:
    """Copy a checkpoint so that all its tensors are whole, with one file of weights and one file of optimizer
    state. Returns the step directory of the copy. Training can continue from it."""
    checkpoint = open_named(path)
    manifest = checkpoint.manifest
    target = save_checkpoint(
        output,
        epoch=manifest.epoch,
        step=manifest.step,
        tensors=[_whole(checkpoint, entry) for entry in manifest.tensors.values()],
        state=manifest.state,
        plan=asdict(ParallelPlan()),
        config=manifest.config,
        fingerprints=manifest.fingerprints,
        vocab_size=manifest.vocab_size,
        documents=documents_in(checkpoint),
        max_file_bytes=_NO_LIMIT,
    )
    _copy_tokenizer_and_config(checkpoint, Path(output))
    return target


def reshard(path: str | Path, output: str | Path, plan: ParallelPlan) -> Path:
    """Copy a checkpoint, split for the tensor- and pipeline-parallel ranks of ``plan``, so that each rank
    finds its slices in its own files. Tensors that tensor parallelism does not split are in the files of
    tensor-parallel rank 0. Returns the step directory of the copy. Raises CheckpointError if the plan does
    not divide the layers or a tensor evenly."""
    checkpoint = open_named(path)
    manifest, output = checkpoint.manifest, Path(output)
    layers_per_stage = _layers_per_stage(manifest, plan)
    with saving(output, manifest.epoch, manifest.step) as staged:
        indices, ranks = [], []
        for pp in range(plan.pp):
            for mp in range(plan.mp):
                directory = rank_directory(mp=mp, pp=pp)
                pieces = [
                    piece
                    for entry in manifest.tensors.values()
                    if _stage_of(entry.name, layers_per_stage, plan.pp) == pp
                    for piece in _pieces(checkpoint, entry, mp, plan.mp)
                ]
                indices.append(write_rank(staged, directory, pieces))
                coordinate = plan.coordinates(len(ranks))
                assert (coordinate["mp"], coordinate["pp"]) == (mp, pp)
                ranks.append({"rank": len(ranks), **coordinate, "directory": directory})
        new = replace(manifest, plan=asdict(plan), ranks=tuple(ranks))
        target = commit(staged, new, indices, documents=documents_in(checkpoint))
    _copy_tokenizer_and_config(checkpoint, output)
    return target


def _copy_tokenizer_and_config(checkpoint: Checkpoint, output: Path) -> None:
    source = find_tokenizer_dir(checkpoint.path)
    if source is not None:
        copy_tokenizer(source, output / TOKENIZER_DIR)
    written = checkpoint.path.resolve().parent / CONFIG_FILE
    if written.is_file():
        shutil.copyfile(written, output / CONFIG_FILE)
    elif isinstance(checkpoint.manifest.config, Mapping):
        with atomic_write(output / CONFIG_FILE, "w") as file:
            yaml.safe_dump(dict(checkpoint.manifest.config), file, sort_keys=False, allow_unicode=True)


def _whole(checkpoint: Checkpoint, entry: TensorEntry) -> TensorSlice:
    return _box(checkpoint, entry, (0,) * len(entry.shape), entry.shape)


def _box(
    checkpoint: Checkpoint, entry: TensorEntry, offset: Sequence[int], shape: Sequence[int]
) -> TensorSlice:
    offset, shape = tuple(offset), tuple(shape)
    return TensorSlice(
        entry.name,
        entry.kind,
        entry.dtype,
        entry.shape,
        offset,
        shape,
        lambda: checkpoint.read(entry.name, entry.kind, entry.state, offset=offset, shape=shape),
        entry.state,
        vocab_dim=entry.vocab_dim,
    )


def _pieces(checkpoint: Checkpoint, entry: TensorEntry, rank: int, degree: int) -> Iterator[TensorSlice]:
    """Yield the slice of a tensor that belongs to a tensor-parallel rank. If the tensor is not split, yield
    the whole tensor for rank 0 and nothing for other ranks."""
    dim = cut_dim(entry.name)
    if dim is not None and _is_split_like_parameter(checkpoint, entry):
        if entry.shape[dim] % degree:
            raise CheckpointError(
                f"mp = {degree} does not divide dimension {dim} of {entry.name} ({entry.shape[dim]} entries)"
            )
        size = entry.shape[dim] // degree
        offset = tuple(rank * size if axis == dim else 0 for axis in range(len(entry.shape)))
        shape = tuple(size if axis == dim else n for axis, n in enumerate(entry.shape))
        yield _box(checkpoint, entry, offset, shape)
    elif rank == 0:
        yield _whole(checkpoint, entry)


def _is_split_like_parameter(checkpoint: Checkpoint, entry: TensorEntry) -> bool:
    parameter = checkpoint.manifest.tensors.get((MODEL, entry.name, ""))
    return parameter is not None and parameter.shape == entry.shape and prod(entry.shape) > 1


def cut_dim(name: str) -> int | None:
    """Return the dimension along which tensor parallelism splits the parameter ``name``, or None."""
    fused = re.sub(r"\.attention\.[qkv]\.", ".attention.qkv.", name)  # FleetX may store q, k and v separately
    fused = re.sub(r"\.mlp\.(?:experts\.\d+|shared)\.", ".mlp.", fused)  # Megatron-LM: experts, too
    return _cut_dims().get(_LAYER_NUMBER.sub(".", fused))


@cache
def _cut_dims() -> dict[str, int]:
    sizes = {"vocab_size": 2, "hidden_size": 2, "num_layers": 1, "num_attention_heads": 1}
    model = ModelConfig(**sizes, tie_word_embeddings=False, add_head_bias=True)
    placements = {name: spec.placement("mp") for name, spec in parameter_specs(model).items()}
    return {_LAYER_NUMBER.sub(".", name): p.dim for name, p in placements.items() if isinstance(p, Shard)}


def _layers_per_stage(manifest: Manifest, plan: ParallelPlan) -> int:
    numbers = {
        int(name.split(".")[2]) for _, name, _ in manifest.tensors if name.startswith("decoder.layers.")
    }
    count = len(numbers)
    if count % plan.pp:
        raise CheckpointError(f"{count} layers cannot be shared out evenly over pp = {plan.pp} stages")
    return count // plan.pp


def _stage_of(name: str, layers_per_stage: int, num_stages: int) -> int:
    if name.startswith("embedding."):
        return 0
    if not name.startswith("decoder.layers."):
        return num_stages - 1
    return int(name.split(".")[2]) // layers_per_stage
