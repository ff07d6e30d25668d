"""Read the weights of FleetX checkpoints. A checkpoint has one ``model.pdparams``, or one in the directory
of each rank."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from ppfleetx.checkpoint.lazy_tensors import LazyTensor, derive
from ppfleetx.checkpoint.manifest import parse_step_directory
from ppfleetx.checkpoint.weights import ForeignCheckpoint, Weights
from ppfleetx.config.errors import CheckpointError, shown
from ppfleetx.config.message_text import counted
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.conversion.join_parameters import check_complete, join_parts, joined, ranks_of_stage
from ppfleetx.conversion.paddle_file import read_paddle_file
from ppfleetx.nn.attention_spec import qkv_parts
from ppfleetx.utils.log import get_logger

MODEL_FILE = "model.pdparams"
_RANK = re.compile(r"mp_(\d{2,})_sharding_(\d{2,})_pp_(\d{2,})")
_WRAPPERS = ("_layers.", "_layer.", "module.", "model.", "gpt.")
# What paddle.nn.quant.quant_layers adds to a quantized layer: scales, and learned limits.
_OF_PADDLESLIM = re.compile(
    r"\._(fake_quant_(weight|input|output)|ma_output_scale|(act|weight)_preprocess)\."
)

# Parameters of a layer: FleetX's name -> our name.
_IN_LAYER = {
    "norm1": "input_norm",
    "self_attn.qkv_proj": "attention.qkv",
    "self_attn.q_proj": "attention.q",
    "self_attn.k_proj": "attention.k",
    "self_attn.v_proj": "attention.v",
    "self_attn.out_proj": "attention.out_proj",
    "norm2": "mlp_norm",
    "linear1": "mlp.fc1",
    "linear2": "mlp.fc2",
}
# In chunks of an interleaved pipeline, the name of the shared embedding is N.embed.
_EMBEDDING = re.compile(
    r"(?:(?:.*\.)?(?:embeddings|shared_layers\.embed)|\d+\.embed)\.(word|position)_embeddings\.weight"
)
_IN_STACK = re.compile(r"decoder\.layers\.(\d+)\.(.+)\.(weight|bias)")
_FINAL_NORM = re.compile(r"decoder\.norm\.(weight|bias)")
# In an interleaved pipeline, names begin with two numbers: the chunk's start, and the index in the chunk.
_IN_PIPELINE = re.compile(r"(\d+)\.(?:(\d+)\.)?(.+)\.(weight|bias)")


def is_fleetx(path: Path) -> bool:
    """Return whether a directory contains FleetX's ``model.pdparams``, directly or in rank directories."""
    return (path / MODEL_FILE).is_file() or any(
        (child / MODEL_FILE).is_file() for child in path.glob("mp_*_sharding_*_pp_*")
    )


def open_fleetx(path: Path) -> ForeignCheckpoint:
    """Open a FleetX directory for reading. The result has the interface of a ppfleetx checkpoint. Raises
    CheckpointError if the directory cannot be read."""
    return ForeignCheckpoint(path, read_fleetx(path))


def read_fleetx(path: str | Path, model: ModelConfig | None = None) -> Weights:
    """Read the weights of a FleetX checkpoint, and join the slices of its ranks.

    Args:
        path: the directory of the checkpoint, or of one of its ranks.
        model: the network; needed only if q, k and v are separate parameters in the checkpoint.

    Raises CheckpointError if ranks are missing, files are damaged or refused, or a parameter is unknown.
    """
    path = Path(path)
    # Optimizer states cannot be read, because Paddle names them by the order of their creation.
    files = _rank_files(path)
    tensors: dict[str, LazyTensor] = {}
    for pp in sorted({pp for _, pp in files}):
        ranks = [_canonical(read_paddle_file(file), file) for file in ranks_of_stage(files, pp)]
        tensors = joined(ranks, path) | tensors  # a tied embedding is on the first and the last stage
    if "decoder.final_norm.weight" not in tensors:
        raise CheckpointError(f"{path} has no final norm: a pipeline rank is missing")
    if any(name.endswith("attention.q.weight") for name in tensors):
        tensors = _fused(tensors, model, path)
    epoch, step = parse_step_directory(path.resolve().name) or (0, 0)
    return Weights(
        str(path), tensors, model=_sizes(tensors), epoch=epoch, step=step, source={"format": "fleetx"}
    )


def _sizes(tensors: Mapping[str, LazyTensor]) -> dict[str, int]:
    """Return keys of the `Model` section that can be derived from the shapes of tensors, such as
    ``num_layers``. The shapes do not show the number of heads, or the vocabulary size without padding."""
    positions = tensors.get("embedding.position_embeddings.weight")
    layers = [int(match[1]) for name in tensors if (match := re.match(r"decoder\.layers\.(\d+)\.", name))]
    keys = {"num_layers": max(layers, default=-1) + 1}
    if positions is not None:
        keys |= dict(zip(("max_position_embeddings", "hidden_size"), positions.shape, strict=False))
    fc1 = tensors.get("decoder.layers.0.mlp.fc1.weight")
    if fc1 is not None and len(fc1.shape) == 2:
        keys["ffn_hidden_size"] = fc1.shape[1]
    return keys


def _rank_files(path: Path) -> dict[tuple[int, int], Path]:
    """Return {(tensor-parallel rank, pipeline rank): file} for the files to read."""
    if (path / MODEL_FILE).is_file():
        match = _RANK.fullmatch(path.resolve().name)
        ranks = [child for child in path.resolve().parent.glob("mp_*") if (child / MODEL_FILE).is_file()]
        if match is None or len(ranks) == 1:
            return {(0, 0): path / MODEL_FILE}
        path = path.resolve().parent
    found = {}
    for child in path.glob("mp_*_sharding_*_pp_*"):
        if match := _RANK.fullmatch(child.name):
            mp, sharding, pp = (int(number) for number in match.groups())
            if sharding == 0:  # all sharding ranks write the same parameters
                found[mp, pp] = child / MODEL_FILE
    if not found:
        raise CheckpointError(f"{path} holds no {MODEL_FILE}, alone or in rank directories")
    check_complete(found, path)
    return found


def _canonical(tensors: Mapping[str, LazyTensor], path: Path) -> dict[str, LazyTensor]:
    named = {}
    left_out = [name for name in tensors if _OF_PADDLESLIM.search(name)]
    if left_out:
        get_logger().info(
            f"{path} was trained with PaddleSlim's quantization: its weights are read, and "
            f"{counted(len(left_out), 'tensor')} of its quantizers, such as {left_out[0]}, left out"
        )
    for name, tensor in tensors.items():
        if _OF_PADDLESLIM.search(name):
            continue
        ours = canonical_name(name.replace("._layer.", "."))  # around layers whose output has a scale
        if ours is None:
            raise CheckpointError(f"{path}: {shown(name)} is not a parameter of FleetX's GPT")
        named[ours] = tensor
    return named


def canonical_name(name: str) -> str | None:
    """Convert a FleetX parameter name to ours; None if FleetX's GPT has no parameter ``name``."""
    bare = _unwrapped(name)
    if match := _EMBEDDING.fullmatch(bare):
        return f"embedding.{match[1]}_embeddings.weight"
    if match := _FINAL_NORM.fullmatch(bare):
        return f"decoder.final_norm.{match[1]}"
    if match := _IN_STACK.fullmatch(bare):
        return _in_layer(int(match[1]), match[2], match[3])
    if match := _IN_PIPELINE.fullmatch(bare):
        if match[3] == "norm":
            return f"decoder.final_norm.{match[4]}"
        return _in_layer(int(match[1]) + int(match[2] or 0) - 1, match[3], match[4])
    return None


def _unwrapped(name: str) -> str:
    for _ in _WRAPPERS:
        for wrapper in _WRAPPERS:
            name = name.removeprefix(wrapper)
    return name


def _in_layer(index: int, part: str, kind: str) -> str | None:
    if part not in _IN_LAYER or index < 0:
        return None
    return f"decoder.layers.{index}.{_IN_LAYER[part]}.{kind}"


def _fused(tensors: dict[str, LazyTensor], model: ModelConfig | None, path: Path) -> dict[str, LazyTensor]:
    if model is None:
        raise CheckpointError(
            f"{path} has separate q, k and v (fuse_attn_qkv: False) and does not say the number of heads; "
            "convert it with ppfleetx convert --from fleetx --config YAML"
        )
    result = dict(tensors)
    for name in tensors:
        if not (match := re.fullmatch(r"(.+\.attention\.)q(\.\w+)", name)):
            continue
        parts = [result.pop(f"{match[1]}{part}{match[2]}", None) for part in "qkv"]
        shapes = [None if part is None else part.shape for part in parts]
        if len(set(shapes)) > 1 or not shapes[0] or shapes[0][-1] % model.num_attention_heads:
            raise CheckpointError(
                f"{path}: q, k and v of {name} have the shapes {shapes}; all must be there, alike, and "
                f"divide by num_attention_heads = {model.num_attention_heads}"
            )
        *rows, columns = shapes[0]
        join = partial(join_parts, qkv_parts(1, columns // model.num_attention_heads))
        ours = f"{match[1]}qkv{match[2]}"
        result[ours] = derive(parts, (*rows, 3 * columns), join, ours)
    return result
