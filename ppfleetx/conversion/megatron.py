"""Read GPT weights from Megatron-LM checkpoints in the classic format, whose files are
``mp_rank_XX[_YYY][_ZZZ]/model_optim_rng.pt``. Legacy models and Megatron Core models are supported.
Optimizer states and the distributed format (``.distcp``) are not supported."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ppfleetx.checkpoint.lazy_tensors import LazyTensor, derive
from ppfleetx.checkpoint.weights import Weights, network_of
from ppfleetx.config.errors import CheckpointError, shown
from ppfleetx.config.reading.tree import nested
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.config.sections.rope import LLAMA3
from ppfleetx.conversion.huggingface.tensor_mapping import expert_loads
from ppfleetx.conversion.join_parameters import check_complete, join_parts, joined, ranks_of_stage
from ppfleetx.conversion.safe_unpickler import Record, flatten, reading
from ppfleetx.conversion.torch_file import read_torch_file
from ppfleetx.dialects.megatron.dialect import ALL_KEYS
from ppfleetx.dialects.megatron.expert_rules import experts
from ppfleetx.dialects.translation import Translation, take
from ppfleetx.dialects.user_options import UserOption
from ppfleetx.nn.mlp_spec import GATE_AND_UP

TRACKER = "latest_checkpointed_iteration.txt"
MODEL_FILES = ("model_optim_rng.pt", "model_rng.pt")
RECORDS = ("argparse.Namespace", "types.SimpleNamespace", "megatron.", "enum.", "pathlib.", "apex.",
           "transformer_engine.", "torch.Generator", "_io.BytesIO")  # fmt: skip
_RANK = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?(?:_(\d{3}))?")
_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\.(.+)\.(weight|bias)")

# Parameters of a layer: Megatron's name -> our name.
_IN_LAYER = {
    "input_layernorm": "input_norm",
    "self_attention.linear_qkv.layer_norm": "input_norm",
    "attention.query_key_value": "attention.qkv",
    "self_attention.query_key_value": "attention.qkv",
    "self_attention.linear_qkv": "attention.qkv",
    "attention.dense": "attention.out_proj",
    "self_attention.dense": "attention.out_proj",
    "self_attention.linear_proj": "attention.out_proj",
    "post_attention_layernorm": "mlp_norm",
    "post_attention_norm": "mlp_norm",
    "input_norm": "input_norm",
    "pre_mlp_layernorm": "mlp_norm",
    "mlp.linear_fc1.layer_norm": "mlp_norm",
    "mlp.dense_h_to_4h": "mlp.fc1",
    "mlp.linear_fc1": "mlp.fc1",
    "mlp.dense_4h_to_h": "mlp.fc2",
    "mlp.linear_fc2": "mlp.fc2",
    "mlp.router": "mlp.router",
    "mlp.shared_experts.linear_fc1": "mlp.shared.fc1",
    "mlp.shared_experts.linear_fc2": "mlp.shared.fc2",
    "mlp.shared_experts.gate": "mlp.shared_gate",
}
_OUTSIDE = {
    "embedding.word_embeddings.weight": "embedding.word_embeddings.weight",
    "embedding.position_embeddings.weight": "embedding.position_embeddings.weight",
    "output_layer.weight": "head.weight",
}
_FINAL_NORM = re.compile(
    r"(?:encoder|transformer|decoder)\.(?:final_layernorm|final_norm|final_layer_norm)\.(weight|bias)"
)
_REFUSED = (
    "apply_residual_connection_post_layernorm", "qk_layernorm", "rotary_interleaved",
    "multi_latent_attention", "use_alibi_position_embeddings", "embed_layernorm",
)  # fmt: skip
# Ignored: buffers, and the second copy of a tied embedding.
_IGNORED = re.compile(r".*(word_embeddings_for_head\.weight|_extra_state|rotary_pos_emb\..*|inv_freq)")


def read_megatron(path: str | Path, model: ModelConfig | None = None) -> Weights:
    """Read the weights of a classic Megatron-LM checkpoint, and join the slices of its ranks.

    Args:
        path: the directory of the checkpoint, of one iteration, or of one rank.
        model: the network; needed if the files do not contain Megatron's ``args``.

    Raises CheckpointError if ranks are missing, files are damaged or refused, or an option is not supported.
    """
    directory = _iteration(Path(path))
    files = _rank_files(directory)
    first = _load(files[min(files)])
    arguments = first.get("args")
    arguments = arguments.state if isinstance(arguments, Record) and isinstance(arguments.state, dict) else {}
    keys = _model_keys(arguments, directory)
    if not keys and model is None:
        raise CheckpointError(
            f"{directory} does not say what network it is (no args); describe it with --config YAML"
        )
    model = model or network_of(keys, f"{directory} (args)")
    version = first.get("checkpoint_version") or 0
    grids = _grids(files, arguments, directory)
    tensors: dict[str, LazyTensor] = {}
    start = 0
    for chunk, pp in _chunks(grids[0], first):
        for ep, grid in enumerate(grids):
            parts = {file: _chunk(_load(file), chunk, file) for file in ranks_of_stage(grid, pp)}
            ranks = [
                _canonical(dict(_split_experts(part, model, len(grids))), start, file, model, version)
                for file, part in parts.items()
            ]
            tensors |= _params_of_expert_rank(joined(ranks, directory), ep, len(grids), model)
        names = next(iter(parts.values()))
        start += len({match[1] for name in names if (match := _LAYER.fullmatch(name))})
    tensors = _stacked(tensors, model, directory) | expert_loads(model)
    if model.tie_word_embeddings:  # the last pipeline stage has a copy
        tensors.pop("head.weight", None)
    return Weights(
        str(directory),
        tensors,
        model=keys,
        vocab_size=keys.get("vocab_size"),
        step=int(first.get("iteration") or 0),
        source={"format": "megatron"},
    )


def _iteration(path: Path) -> Path:
    tracker = path / TRACKER
    if tracker.exists():
        named = tracker.read_text("ascii", "replace").strip()
        is_number = named.isascii() and named.isdigit()
        directory = path / (f"iter_{int(named):07d}" if is_number else named)
        if not (is_number or named == "release") or not directory.is_dir():
            raise CheckpointError(f"{tracker} names {shown(named)}, which does not exist")
        return directory
    if any((path / name).is_file() for name in MODEL_FILES) and _RANK.fullmatch(path.resolve().name):
        return path.resolve().parent
    return path


def _rank_files(directory: Path) -> dict[tuple[int, ...], Path]:
    """Return {numbers in the name of a rank's directory: file}. The numbers of ``mp_rank_01_000`` are
    (1, 0)."""
    found = {}
    for child in sorted(directory.glob("mp_rank_*")):
        match = _RANK.fullmatch(child.name)
        if match is None:
            raise CheckpointError(f"{child} is not a rank directory that can be read")
        file = next((child / name for name in MODEL_FILES if (child / name).is_file()), None)
        if file is not None:
            found[tuple(int(number) for number in match.groups() if number)] = file
    if not found:
        hint = "; the distributed format (.distcp) is not read" if any(directory.glob("*.distcp")) else ""
        raise CheckpointError(f"{directory} holds no mp_rank_XX[_YYY]/{MODEL_FILES[0]}{hint}")
    return found


def _grids(
    files: Mapping[tuple[int, ...], Path], arguments: Mapping[str, Any], directory: Path
) -> list[dict[tuple[int, int], Path]]:
    """Return {(tensor-parallel rank, pipeline rank): file} for each expert-parallel rank.

    Args:
        files: the result of :func:`_rank_files`.
        arguments: Megatron's options, which contain the parallel degrees.

    Raises CheckpointError if files are missing, or if the name of a directory has too many numbers.
    """
    # The first number is the tensor-parallel rank. The pipeline rank follows if there are several stages, and
    # then the expert-parallel rank, if the expert-parallel degree is above 1.
    ep_degree = arguments.get("expert_model_parallel_size") or 1
    has_stages = ep_degree == 1 or (arguments.get("pipeline_model_parallel_size") or 1) > 1
    grids: dict[int, dict[tuple[int, int], Path]] = {}
    for (mp, *rest), file in files.items():
        pp = rest.pop(0) if rest and has_stages else 0
        ep = rest.pop(0) if rest else 0
        if rest:
            raise CheckpointError(f"{file.parent} has more numbers in its name than its options have axes")
        grids.setdefault(ep, {})[mp, pp] = file
    for ep in range(ep_degree):
        if ep not in grids:
            raise CheckpointError(f"{directory} lacks expert rank {ep} of {ep_degree}")
        check_complete(grids[ep], directory)
    if len({frozenset(grid) for grid in grids.values()}) > 1:
        raise CheckpointError(f"{directory} lacks the files of some expert-parallel ranks")
    return [grids[ep] for ep in range(ep_degree)]


def _load(path: Path) -> dict[str, Any]:
    tree = read_torch_file(path, record_prefixes=RECORDS)
    if not isinstance(tree, dict) or not ({"model", "model0"} & tree.keys()):
        raise CheckpointError(f"{path} is not a checkpoint of Megatron-LM: it has no model")
    return tree


def _chunks(grid: Mapping[tuple[int, int], Path], first: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield the location of each model chunk, in the order of their layers: (key in the rank's file, pipeline
    rank). With an interleaved pipeline schedule, each rank has several chunks.

    Args:
        grid: the files of one expert-parallel rank.
        first: the content of one rank's file.
    """
    stages = sorted({pp for _, pp in grid})
    count = 0
    while f"model{count}" in first:
        count += 1
    for key in [f"model{index}" for index in range(count)] or ["model"]:
        for pp in stages:
            yield key, pp


def _chunk(tree: Mapping[str, Any], key: str, path: Path) -> dict[str, LazyTensor]:
    if not isinstance(tree.get(key), dict):
        raise CheckpointError(f"{path} has no {key}")
    named = {}
    with reading(path):
        tensors = flatten(tree[key])
    for name, tensor in tensors.items():
        bare = name.removeprefix("module.").removeprefix("language_model.")
        if not _IGNORED.fullmatch(bare):
            named[bare] = tensor
    return named


def _canonical(
    chunk: Mapping[str, LazyTensor], start: int, path: Path, model: ModelConfig, version: float
) -> dict[str, LazyTensor]:
    """Convert the parameters of a model chunk to ppfleetx's names and layout.

    Args:
        start: the number of the chunk's first layer in the whole model.
        path: the file of the chunk, for messages.
        version: Megatron's checkpoint version.
    """
    named = {}
    for name, tensor in chunk.items():
        ours = _canonical_name(name, start)
        if ours is None:
            raise CheckpointError(f"{path}: {shown(name)} is not a parameter of a GPT that can be read")
        if ours in named:
            raise CheckpointError(f"{path} holds {shown(name)} twice, under two names")
        named[ours] = _in_our_layout(ours, tensor, model, version)
    return named


def _canonical_name(name: str, start: int) -> str | None:
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    if match := _FINAL_NORM.fullmatch(name):
        return f"decoder.final_norm.{match[1]}"
    # Transformer Engine stores a norm in the linear layer that follows: linear_qkv.layer_norm_weight.
    bare = re.sub(r"\.layer_norm_(weight|bias)$", r".layer_norm.\1", name)
    bare = re.sub(r"\.router\.expert_bias$", ".router.bias", bare)
    bare = re.sub(r"\.shared_experts\.gate_weight$", ".shared_experts.gate.weight", bare)
    in_layer = re.fullmatch(r"(?:.*\.)?layers\.(\d+)\.(.+)", bare)
    if in_layer is not None and (of_expert := _expert_name(in_layer[2])) is not None:
        return f"decoder.layers.{start + int(in_layer[1])}.{of_expert}"
    match = _LAYER.fullmatch(bare)
    if match is None or match[2] not in _IN_LAYER:
        return None
    return f"decoder.layers.{start + int(match[1])}.{_IN_LAYER[match[2]]}.{match[3]}"


def _in_our_layout(name: str, tensor: LazyTensor, model: ModelConfig, version: float) -> LazyTensor:
    """Convert one rank's slice of a parameter from Megatron's layout to ours.

    Args:
        name: ppfleetx's name of the parameter.
        version: Megatron's checkpoint version.
    """
    if name.startswith("embedding."):
        return tensor
    layer, rows_at_once = name.rpartition(".")[0], 1
    if layer.endswith(".fc1") and model.is_gated:
        rows_at_once = 2
    elif layer.endswith("attention.qkv"):
        rows_at_once = model.head_size * (1 if version >= 2.0 else 3)
    if not tensor.shape or tensor.shape[0] % rows_at_once:
        raise CheckpointError(f"{name} has shape {list(tensor.shape)}, which does not fit the Model section")

    def make(array: np.ndarray) -> np.ndarray:
        if layer.endswith(".fc1") and model.is_gated:  # all rows of gate, then all rows of up
            return join_parts(GATE_AND_UP, *(half.T for half in np.split(array, 2, axis=0)))
        if layer.endswith("attention.qkv"):
            return _grouped(array, model.head_size, version).T
        return array.T

    return derive([tensor], tensor.shape[::-1], make, name)


def _grouped(array: np.ndarray, head_dim: int, version: float) -> np.ndarray:
    """Return a fused q, k, v parameter with its rows in the order of Megatron's checkpoint version 2. There,
    q, k and v are grouped by key/value head.

    Args:
        version: Megatron's checkpoint version of ``array``. Before version 2, the order was different.
    """
    if version >= 2.0:
        return array
    # Version 0 has the order [3, heads, head_dim], version 1 [heads, head_dim, 3].
    heads = prod(array.shape[:1]) // (3 * head_dim)
    rest = array.shape[1:]
    if version >= 1.0:
        return array.reshape(heads, head_dim, 3, *rest).swapaxes(1, 2).reshape(array.shape)
    return array.reshape(3, heads, head_dim, *rest).swapaxes(0, 1).reshape(array.shape)


def _model_keys(arguments: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Convert Megatron's options to keys of the `Model` section. The result is empty if the number of layers,
    the number of heads or the hidden size is missing. Raises CheckpointError if an option is not
    supported."""

    def get(name: str, default: Any = None) -> Any:
        value = arguments.get(name, default)
        if value is not None and type(value) not in (bool, int, float, str):
            raise CheckpointError(f"{directory}: Megatron's option {name} is {shown(value)}")
        return value

    for key in _REFUSED:
        if value := get(key):
            raise CheckpointError(f"{directory}: Megatron's option {key} = {shown(value)} is not supported")
    heads, hidden = get("num_attention_heads"), get("hidden_size")
    if not (heads and hidden and get("num_layers")):
        return {}
    rope = get("position_embedding_type") == "rope" or get("use_rotary_position_embeddings")
    norm = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}.get(get("normalization"), get("normalization"))
    if get("apply_layernorm_1p") or get("layernorm_zero_centered_gamma"):  # norm weights are stored minus 1
        norm = f"{norm or 'LayerNorm'}1P"
    keys = {
        "vocab_size": get("vocab_size") or get("padded_vocab_size"),
        "hidden_size": hidden,
        "num_layers": get("num_layers"),
        "num_attention_heads": heads,
        "num_query_groups": get("num_query_groups") if get("group_query_attention") else None,
        "head_dim": get("kv_channels"),
        "ffn_hidden_size": get("ffn_hidden_size") or 4 * hidden,
        "max_position_embeddings": get("max_position_embeddings"),
        "hidden_act": _activation(get),
        "norm_epsilon": get("norm_epsilon") or get("layernorm_epsilon") or 1e-5,
        "initializer_range": get("init_method_std"),
        "hidden_dropout_prob": get("hidden_dropout"),
        "attention_probs_dropout_prob": get("attention_dropout"),
        "position_embedding_type": "rope" if rope else get("position_embedding_type"),
        "rotary_base": get("rotary_base") or 10000.0,
        "rotary_percent": get("rotary_percent"),
        "normalization": norm,
        "tie_word_embeddings": not get("untie_embeddings_and_output_weights", False),
        "add_bias_linear": get("add_bias_linear", True),
        "add_qkv_bias": True if get("add_qkv_bias") else None,
        "moe": _moe_section(arguments, str(directory)),
    }
    given = {key: value for key, value in keys.items() if value is not None}
    return given | {"rope_scaling": _rope_scaling(get, directory)} if rope else given


def _rope_scaling(get: Any, directory: Path) -> dict[str, Any] | None:
    interpolation = get("rotary_seq_len_interpolation_factor")
    if not get("use_rope_scaling"):
        return {"type": "linear", "factor": interpolation} if interpolation not in (None, 1) else None
    if interpolation not in (None, 1):
        raise CheckpointError(
            f"{directory}: Megatron's options use_rope_scaling and rotary_seq_len_interpolation_factor = "
            f"{shown(interpolation)} are supported one at a time"
        )
    return {"type": "llama3", "factor": get("rope_scaling_factor") or 8.0, **LLAMA3}


def _activation(get: Any) -> str:
    if get("swiglu"):
        return "swiglu"
    if get("squared_relu"):
        return "relu2"
    # Megatron's fused bias-GeLU kernel uses the tanh approximation. Its unfused GeLU is exact.
    tanh = get("bias_gelu_fusion") or get("openai_gelu")
    return "gelu" if tanh else "gelu_exact"


# ---- mixtures of experts: the file of an expert-parallel rank numbers the rank's experts from 0

_MOE = "Model.moe."
_OF_EXPERTS = (
    "num_experts", "num_layers", "n_shared_experts", "first_k_dense_replace", "norm_topk_prob", "seq_aux",
    "routed_scaling_factor",
)  # fmt: skip
_REFUSED_OF_EXPERTS = ("moe_apply_probs_on_input", "moe_latent_size", "moe_tp_extend_ep")
# The name of expert N's matrix is local_experts.N.linear_fc1.weight, or linear_fc1.weightN with Transformer
# Engine. In older versions, one tensor contains the matrices of all experts.
_EXPERT = re.compile(
    r"mlp\.experts\.(?:local_experts\.(?P<layer>\d+)\.)?linear_(?P<linear>fc[12])\."
    r"(?P<kind>weight|bias)(?P<grouped>\d*)"
)
_ALL_TOGETHER = re.compile(r"(.*\.mlp\.experts\.)weight([12])")
_OUR_EXPERT = re.compile(r"(.*\.mlp\.experts\.)(\d+)\.(.+)")


def _moe_section(arguments: Mapping[str, Any], place: str) -> dict[str, Any] | None:
    """Convert Megatron's options to the ``Model.moe`` section; None if the network has no experts. Raises
    UserError if an option is not supported."""
    run = Translation("Megatron", place)
    for name, value in arguments.items():
        if name in _OF_EXPERTS or name.startswith("moe_"):
            run.given[name] = one = UserOption(name, value, place)
            key = ALL_KEYS.find(name)
            if key is not None and key.convert is not None and value is not None:
                take(one, key, run)
    experts(run)
    found = nested(
        (key.removeprefix(_MOE), native.value) for key, native in run.native.items() if key.startswith(_MOE)
    )
    if not found:
        return None
    refused = [name for name in _REFUSED_OF_EXPERTS if arguments.get(name)]
    sliced, tensor = "expert_tensor_parallel_size", arguments.get("tensor_model_parallel_size") or 1
    if (arguments.get(sliced) or tensor) != tensor:  # experts must be sliced like attention
        refused.append(sliced)
    for name in refused:
        raise CheckpointError(
            f"{place}: Megatron's option {name} = {shown(arguments[name])} is not supported"
        )
    return found


def _split_experts(
    chunk: Mapping[str, LazyTensor], model: ModelConfig, ep: int
) -> Iterator[tuple[str, LazyTensor]]:
    """Yield (name, tensor) for the tensors of a model chunk. A tensor that contains several experts is split
    into one tensor per expert.

    Args:
        ep: the expert-parallel degree.
    """
    for name, tensor in chunk.items():
        match = _ALL_TOGETHER.fullmatch(name)
        if match is None or model.moe is None:
            yield name, tensor
            continue
        count, hidden = model.moe.num_experts // ep, model.hidden_size
        size = int(np.prod(tensor.shape)) // (count * hidden)
        if tensor.shape != ((hidden, count * size) if match[2] == "1" else (count * size, hidden)):
            raise CheckpointError(
                f"{name} has shape {list(tensor.shape)}, which does not fit {count} experts"
            )
        inner = (hidden, size) if match[2] == "1" else (size, hidden)
        for number in range(count):
            ours = f"{match[1]}local_experts.{number}.linear_fc{match[2]}.weight"
            yield ours, derive([tensor], inner[::-1], partial(_matrix, (count, *inner), number), name)


def _matrix(shape: tuple[int, ...], number: int, array: np.ndarray) -> np.ndarray:
    return array.reshape(shape)[number].T


def _expert_name(in_layer: str) -> str | None:
    """Return our name of an expert's parameter, such as ``mlp.experts.3.fc1.weight``. None if the parameter
    does not belong to an expert. The expert keeps the number that it has in the file.

    Args:
        in_layer: Megatron's name of the parameter, without the prefix of the layer.
    """
    match = _EXPERT.fullmatch(in_layer)
    if match is None or bool(match["layer"]) == bool(match["grouped"]):
        return None
    return f"mlp.experts.{match['layer'] or match['grouped']}.{match['linear']}.{match['kind']}"


def _params_of_expert_rank(
    tensors: Mapping[str, LazyTensor], rank: int, ep: int, model: ModelConfig
) -> dict[str, LazyTensor]:
    """Select the parameters to read from one expert-parallel rank: its experts, with global instead of local
    expert numbers, and, only from rank 0, all parameters that do not belong to experts.

    Args:
        tensors: the parameters of the rank, with local expert numbers, which start at 0 on every rank.
        rank: the expert-parallel rank.
        ep: the expert-parallel degree.
    """
    found = {}
    for name, tensor in tensors.items():
        match = _OUR_EXPERT.fullmatch(name)
        if match is not None:
            assert model.moe is not None
            number = int(match[2]) + rank * (model.moe.num_experts // ep)
            found[f"{match[1]}{number}.{match[3]}"] = tensor
        elif rank == 0:
            found[name] = tensor
    return found


def _stacked(tensors: Mapping[str, LazyTensor], model: ModelConfig, directory: Path) -> dict[str, LazyTensor]:
    """Stack the matrices of each layer's experts into tensors whose first dimension is the expert. Raises
    CheckpointError if an expert is missing or unexpected, or if shapes differ."""
    found, layers = {}, dict[str, dict[int, LazyTensor]]()
    for name, tensor in tensors.items():
        match = _OUR_EXPERT.fullmatch(name)
        if match is None:
            found[name] = tensor
        else:
            layers.setdefault(match[1] + match[3], {})[int(match[2])] = tensor
    for name, of_experts in layers.items():
        wanted = set(range(model.moe.num_experts if model.moe else 0))
        if wrong := wanted ^ of_experts.keys():
            what = "lacks" if wrong & wanted else "has, beyond those of the options,"
            raise CheckpointError(f"{directory} {what} experts {sorted(wrong)} of {name}")
        parts = [of_experts[number] for number in sorted(of_experts)]
        if len({part.shape for part in parts}) > 1:
            raise CheckpointError(f"{directory}: the experts of {name} differ in shape")
        found[name] = derive(parts, (len(parts), *parts[0].shape), lambda *each: np.stack(each), name)
    return found
