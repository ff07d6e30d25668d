"""Rewrite PaddleFleetX's old keys and values, with warnings, and refuse features that ppfleetx lacks.

In the tables below, ``*`` in a key matches any name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from ppfleetx.config.errors import ConfigError, shown
from ppfleetx.config.reading.tree import (
    Node,
    copy_tree,
    is_argument,
    merge,
    node_of,
    plain_value,
    same_value,
)
from ppfleetx.config.sections.data import GLUE_OUTPUTS

# FleetX's later layout (examples/transformer) has these keys in Global and no Engine section.
_ENGINE_KEYS = (
    "run_mode max_steps num_train_epochs accumulate_steps logging_freq eval_freq eval_iters test_iters "
    "mix_precision save_load"
)

_RENAMED = {
    **{f"Global.{key}": f"Engine.{key}" for key in _ENGINE_KEYS.split()},
    "Quantization": "Compress.Quantization",
    "Engine.mix_precision.use_main_grad": "Engine.mix_precision.main_grad_fp32",
    "Engine.mix_precision.init_loss_scaling": "Engine.mix_precision.scale_loss",
    "Distributed.pp_recompute_interval": "Model.recompute_interval",
    "Model.pp_recompute_interval": "Model.recompute_interval",
    "Distributed.sharding.comm_overlap": "Distributed.sharding.reduce_overlap",
    "Model.pretrained": "Engine.save_load.init_from",
    "Compress.Quantization.pretrained": "Engine.save_load.init_from",
    "Compress.pretrained": "Engine.save_load.init_from",
    "Data.*.dataset.root": "Data.*.dataset.input_dir",
    "Data.*.dataset.max_length": "Data.*.dataset.max_seq_len",
    "Optimizer.lr.learning_rate": "Optimizer.lr.max_lr",
}

_DROPPED = {
    "Global.enable_partial_send_recv": "the pipeline decides it",
    "Model.type_vocab_size": "GPT has no token types",
    "Model.fused_softmax_with_triangular": "Model.attention_kernel chooses the kernel, always causal",
    "Model.loss": "the task decides the loss",
    "Model.metric": "the task decides the metric",
    "Data.*.sampler.batch_size": "Global decides the batch sizes",
    "Data.*.loader.return_list": "batches have one form",
    "Data.*.loader.collate_fn": "the dataset decides how samples are joined",
    "Engine.mix_precision.use_fp16_guard": "level decides what is computed in 16 bits",
    "Optimizer.multi_precision": "Engine.mix_precision decides it",
    "Optimizer.tensor_fusion": "it changes no result",
    "Optimizer.lr.run_mode": "the schedule counts optimizer steps",
    "Optimizer.lr.use_increments": "the schedule counts optimizer steps; decay_steps keeps its value",
    "Distributed.hcg": "there is one kind of communication group",
    "Distributed.fuse_sequence_parallel_allreduce": "Paddle 3.3's fused form does not run",
    "Distributed.use_main_grad": "Engine.mix_precision.main_grad_fp32 decides it",
    "Generation.use_topp_sampling": "top_p says it",
    "Generation.inference": "exporting says it",
    "Generation.early_finish": "generation ends when every sequence has ended",
    "Compress.Quantization.onnx_format": "exported models have one format",
    "Compress.Quantization.for_tensorrt": "exported models have one format",
    "Compress.Quantization.is_full_quantize": "quantizable_layer_type says what is quantized",
    "Compress.Prune.cal_sens": "ppfleetx prune reports what is removed",
    "Tuning": "there is no automatic parallel mode",
    "Fused": "it changes no result",
    "FusedParameters": "it changes no result",
}

_VALUES: dict[str, dict[Any, Any]] = {
    "Engine.mix_precision.level": {"o1": "O1", "o2": "O2"},
    "Optimizer.name": {"FusedAdamW": "AdamW"},
    "Optimizer.grad_clip.name": {"ClipGradForMOEByGlobalNorm": "ClipGradByGlobalNorm"},
    "Data.*.sampler.name": {"DistributedBatchSampler": "GPTBatchSampler"},
}

_OFFLINE = frozenset({"LM_Eval_Dataset", "Lambada_Eval_Dataset"})

# For keys of section Engine: the value that replaces -1 (None: the default), and the reason.
_UNLIMITED: dict[str, tuple[int | None, str]] = {
    "max_steps": (2**31 - 1, "Engine.num_train_epochs ends the run"),
    "eval_iters": (
        None,
        "sets of texts are read to their end, and of a corpus the default number of batches",
    ),
    "test_iters": (None, "sets of texts are read to their end"),
}


def modernize(tree: Node, *, is_whole: bool = False) -> tuple[Node, tuple[str, ...]]:
    """Rewrite FleetX's old keys and values in ``tree``. Returns the new tree, and warnings about the changes.

    ``is_whole`` says whether ``tree`` has been merged with its base files and overrides. Rules that read
    several sections are applied only then.
    """
    tree = copy_tree(tree)
    warnings = [
        *_rename(tree),
        *_each(tree, "Engine.mix_precision.use_pure_fp16", _pure_fp16),
        *_each(tree, "Optimizer.lr.warmup", _warmup),
        *_drop(tree),
        *_replace_values(tree),
        # These rules read several sections.
        *((*_set_missing_task(tree), *_unlimited(tree), *_rewrite_experts(tree)) if is_whole else ()),
    ]
    return tree, tuple(warnings)


def _find(tree: Node, pattern: str, above: str = "") -> Iterator[tuple[Node, str, str]]:
    """Yield each key in ``tree`` that matches the dotted key ``pattern``, in which ``*`` matches any name.

    Each result is (mapping that contains the key, last part of the key, full dotted key).
    """
    first, _, rest = pattern.partition(".")
    names = list(tree.value) if isinstance(tree.value, dict) else []
    for name in names:
        if first not in ("*", name):
            continue
        if rest:
            yield from _find(tree.value[name], rest, f"{above}{name}.")
        else:
            yield tree, name, above + name


def _set(tree: Node, key: str, node: Node, old: str) -> None:
    *sections, last = key.split(".")
    for depth, section in enumerate(sections):
        child = tree.value.get(section)
        if child is None or child.value is None:
            child = tree.value[section] = Node({}, node.place)
        elif not isinstance(child.value, dict):
            raise ConfigError(
                f"must be a section: {old} ({node.place}) is now {key}",
                key=".".join(sections[: depth + 1]),
                value=plain_value(child),
                place=child.place,
            )
        tree = child
    present = tree.value.get(last)
    if present is not None and isinstance(present.value, dict) and isinstance(node.value, dict):
        node = merge(present, node)
    elif not (
        present is None
        or present.value is None
        or same_value(present, node)
        or (is_argument(node.place) and not is_argument(present.place))
    ):
        raise ConfigError(
            f"contradicts its old spelling {old} = {shown(plain_value(node))} ({node.place})",
            key=key,
            value=plain_value(present),
            place=present.place,
        )
    tree.value[last] = node


def _rename(tree: Node) -> Iterator[str]:
    for old, new in _RENAMED.items():
        for mapping, name, path in list(_find(tree, old)):
            node = mapping.value.pop(name)
            target = new.replace("*", path.split(".")[1]) if "*" in new else new
            if node.value is None:
                continue
            _set(tree, target, node, path)
            yield f"{path} ({node.place}) is an old spelling of {target}"


def _drop(tree: Node) -> Iterator[str]:
    for old, reason in _DROPPED.items():
        for mapping, name, path in list(_find(tree, old)):
            node = mapping.value.pop(name)
            yield f"{path} ({node.place}) is not used any more: {reason}"


def _replace_values(tree: Node) -> Iterator[str]:
    for pattern, values in _VALUES.items():
        for mapping, name, path in _find(tree, pattern):
            node = mapping.value[name]
            if isinstance(node.value, str) and node.value in values:
                new = values[node.value]
                mapping.value[name] = Node(new, node.place)
                yield f"{path} = {node.value} ({node.place}) is an old name of {new}"


def _each(tree: Node, key: str, rewrite: Callable[[Node, str, Node], str]) -> Iterator[str]:
    for mapping, name, path in list(_find(tree, key)):
        yield rewrite(tree, path, mapping.value.pop(name))


def _pure_fp16(tree: Node, path: str, node: Node) -> str:
    section = path.rpartition(".")[0]
    _set(tree, f"{section}.enable", Node(node.value, node.place), path)
    if node.value is True:
        _set(tree, f"{section}.dtype", Node("float16", node.place), path)
        _set(tree, f"{section}.level", Node("O2", node.place), path)
    return f"{path} ({node.place}) is an old spelling of {section}.enable with dtype float16 and level O2"


def _warmup(tree: Node, path: str, node: Node) -> str:
    is_rate = isinstance(node.value, float) and node.value < 1
    target = "Optimizer.lr.warmup_rate" if is_rate else "Optimizer.lr.warmup_steps"
    _set(tree, target, node, path)
    return f"{path} ({node.place}) is an old spelling of {target}"


def _set_missing_task(tree: Node) -> Iterator[str]:
    """Set ``Model.module``, if it is missing, to the task that the configured dataset is for, because the
    configuration files of later FleetX versions do not name the task. Yields warnings.

    Also removes ``Data.Eval`` if its dataset is for offline evaluation: offline evaluation reads the section
    ``Offline_Eval``.
    """
    for section, names, module in (
        ("Train", frozenset(GLUE_OUTPUTS), "GPTFinetuneModule"),
        ("Eval", _OFFLINE, "GPTEvalModule"),
    ):
        for mapping, name, path in list(_find(tree, f"Data.{section}.dataset.name")):
            node = mapping.value[name]
            if not isinstance(node.value, str) or node.value not in names:
                continue
            if not any(found.value[key].value for found, key, _ in _find(tree, "Model.module")):
                _set(tree, "Model.module", Node(module, node.place), path)
                yield f"{path} = {node.value} ({node.place}) is read as Model.module {module}"
            if names is _OFFLINE:
                del tree.value["Data"].value[section]
                yield f"Data.{section} ({node.place}) is not used: Offline_Eval names what is measured"


def _unlimited(tree: Node) -> Iterator[str]:
    """Rewrite limits of -1 (no limit) in section ``Engine``. Yields warnings.

    Only configurations with ``run_mode: epoch`` are changed. ``max_steps`` becomes a very large number.
    ``eval_iters`` and ``test_iters`` are removed, so their defaults apply.
    """
    if not any(mapping.value[name].value == "epoch" for mapping, name, _ in _find(tree, "Engine.run_mode")):
        return
    for key, (limit, why) in _UNLIMITED.items():
        for mapping, name, path in list(_find(tree, f"Engine.{key}")):
            node = mapping.value[name]
            if node.value != -1:
                continue
            if limit is None:
                del mapping.value[name]
            else:
                mapping.value[name] = Node(limit, node.place)
            became = "not used" if limit is None else f"read as {limit}"
            yield f"{path} = -1 ({node.place}) is {became}: {why}"


_OTHER_MODELS = ("Ernie", "GeneralCls", "Imagen", "MOCO", "Bert", "Debertav2", "T5", "CLIP", "Protein", "VIS")


_UNSUPPORTED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        "Model.module",
        lambda value: str(value).startswith(_OTHER_MODELS),
        "this program has GPT models only; use FleetX for its other models",
    ),
    (
        "Model.module",
        lambda value: str(value).endswith("Auto"),
        "this program has no automatic parallel mode (FleetX's tools/auto.py), in which Paddle cuts up a "
        "static program; take the module of this name without Auto, and choose the degrees in Distributed",
    ),
    (
        "Model.name",
        lambda value: value == "GPT-cn",
        "this program does not read the tokenizer of FleetX's Chinese GPT (PaddleNLP's GPTChineseTokenizer); "
        "the network is that of Model.name: GPT, which trains on corpora of its token ids",
    ),
)


def refuse_unsupported(tree: Node) -> None:
    """Raise ConfigError if ``tree`` uses a FleetX feature that ppfleetx does not have."""
    for key, applies, rule in _UNSUPPORTED:
        for mapping, name, _ in _find(tree, key):
            node = mapping.value[name]
            if applies(plain_value(node)):
                raise ConfigError(rule, key=key, value=plain_value(node), place=node.place)


# ---- mixtures of experts. FleetX's keys are read, but its formulas are not used: FleetX weights experts by
# raw logits, counts some choices twice and scales the loss by the number of experts on a rank.

_LOSSES = {"gshard": "gshard", "switch": "switch", "naive": "none"}
_MOE_SECTION_KEYS = ("expert_mode", "gate", "top_k", "num_experts")
# Keys of FleetX's later layout (examples/transformer), besides num_experts.
_FLAT_MOE_KEYS = (
    "expert_interval", "topk", "moe_use_residual", "moe_train_capacity_factor", "moe_eval_capacity_factor",
    "moe_min_capacity", "moe_token_dropping", "enable_expert_tensor_parallelism", "balance_loss_weight",
)  # fmt: skip

_UNUSED_MOE_KEYS = ("moe_eval_capacity_factor", "moe_min_capacity")


def _rewrite_experts(tree: Node) -> list[str]:
    """Rewrite FleetX's expert keys in ``tree`` in place, and return warnings."""
    model, engine = _section(tree, "Model"), _section(tree, "Engine")
    given = model.pop("moe_configs", None)
    flat = {key: model.pop(key) for key in _FLAT_MOE_KEYS if key in model}
    if flat and "num_experts" in model:
        flat["num_experts"] = model.pop("num_experts")
    weight = engine.pop("balance_loss_weight", None) or flat.get("balance_loss_weight")
    for key, dense in (("module", "GPTModule"), ("name", "GPT")):
        if key in model and model[key].value in ("MoEModule", "MoE"):
            model[key] = Node(dense, model[key].place)
    mode = given.value.get("expert_mode") if given is not None and isinstance(given.value, dict) else None
    if mode is not None and mode.value is False:
        return [f"Model.moe_configs ({given.place}) is not used: expert_mode is False"]
    unread: list[str] = []
    if given is not None and given.value is not None:
        place, unread = given.place, [*flat]
        moe, degree = _convert_moe_section(_checked_moe_keys(given), _section(tree, "Distributed"))
    elif _count("Model", flat, "num_experts", 1) > 1:
        place, degree = flat["num_experts"].place, 1
        moe = _convert_flat_moe(flat, model)
        unread = [key for key in _UNUSED_MOE_KEYS if key in flat and flat[key].value is not None]
        slices = flat.get("enable_expert_tensor_parallelism")
        if slices is not None and slices.value is False:
            _section(tree, "Distributed")["expert_mp_degree"] = Node(1, slices.place)
    else:
        return [
            f"Model.{key} ({node.place}) is not used: the model has no experts" for key, node in flat.items()
        ]
    if moe["aux_loss"]["kind"] != "none" and weight is not None:
        moe["aux_loss"]["weight"] = weight.value
    model["moe"] = node_of(moe, place)
    if degree > 1:
        _section(tree, "Distributed")["ep_degree"] = Node(degree, place)
    made = ", ".join(f"{key} {value}" for key, value in moe.items() if not isinstance(value, dict | list))
    notes = [f"Model.{key} ({flat[key].place}) is not used: Model.moe has no such setting" for key in unread]
    return [
        *notes,
        f"FleetX's experts ({place}) are read as Model.moe ({made}), by formulas that do not depend on "
        "the plan: experts are weighted by probabilities, and the balancing loss is E sum(f P)",
    ]


def _checked_moe_keys(section: Node) -> dict[str, Node]:
    keys = section.value
    if not isinstance(keys, dict):
        value = plain_value(section)
        raise ConfigError("must be a section", key="Model.moe_configs", value=value, place=section.place)
    if unknown := [key for key in keys if key not in _MOE_SECTION_KEYS]:
        key, place = unknown[0], keys[unknown[0]].place
        raise ConfigError(
            f"there is no such key; the keys are {', '.join(_MOE_SECTION_KEYS)}",
            key=f"Model.moe_configs.{key}",
            place=place,
        )
    return keys


def _convert_moe_section(keys: dict[str, Node], distributed: dict[str, Node]) -> tuple[dict[str, Any], int]:
    """Convert FleetX's section ``moe_configs`` to keys of ``Model.moe``. Returns (these keys and their
    values, expert-parallel degree)."""
    gate = plain_value(keys["gate"]) if "gate" in keys else "gshard"
    if gate not in _LOSSES:
        raise ConfigError(
            f"must be one of {', '.join(_LOSSES)}",
            key="Model.moe_configs.gate",
            value=gate,
            place=keys["gate"].place,
        )
    degree = math.prod(_count("Distributed", distributed, key, 1) for key in ("dp_degree", "mp_degree"))
    each = _count("Model.moe_configs", keys, "num_experts", 1)
    top_k = _count("Model.moe_configs", keys, "top_k", 2)
    # FleetX gives the number of experts per rank, and every layer is a mixture of experts.
    moe = {
        "num_experts": each * degree,
        "top_k": 1 if gate == "switch" else top_k,
        "router": {"normalize": gate != "switch"},
        "aux_loss": {"kind": _LOSSES[gate]},
    }
    return moe, degree


def _convert_flat_moe(flat: dict[str, Node], model: dict[str, Node]) -> dict[str, Any]:
    """Convert FleetX's expert keys in section ``Model``, which have DeepSpeed's names, to ``Model.moe``."""
    residual = flat.get("moe_use_residual")
    if residual is not None and residual.value is True:
        raise ConfigError(
            "a weighted dense block beside the experts is not supported; use Model.moe.shared_experts",
            key="Model.moe_use_residual",
            value=True,
            place=residual.place,
        )
    interval, top_k = _count("Model", flat, "expert_interval", 2), _count("Model", flat, "topk", 1)
    layers = _count("Model", model, "num_layers", 0)
    drops = flat.get("moe_token_dropping")
    factor = flat.get("moe_train_capacity_factor")
    moe: dict[str, Any] = {
        "num_experts": _count("Model", flat, "num_experts", 1),
        "top_k": top_k,
        "layers": list(range(interval - 1, layers, interval)),
        "router": {"normalize": top_k > 1},
        "aux_loss": {"kind": "switch" if top_k == 1 else "gshard"},
    }
    if drops is None or drops.value is not False:
        whole = 1.0 if factor is None or factor.value is None else factor.value
        moe["capacity"] = {"factor": whole, "policy": "position"}
    return moe


def _section(tree: Node, name: str) -> dict[str, Node]:
    """Return the keys and values of the top-level section ``name`` as a dict that may be changed in place.

    If the section is missing, the dict is new and not part of ``tree``.
    """
    node = tree.value.get(name)
    return node.value if node is not None and isinstance(node.value, dict) else {}


def _count(section: str, keys: dict[str, Node], key: str, default: int) -> int:
    """Return the integer at ``key`` in ``keys``, or ``default`` if the key is missing or null. A trailing
    comma is ignored. Raises ConfigError if the value is not an integer of at least 1."""
    node = keys.get(key)
    if node is None or node.value is None:
        return default
    # One of FleetX's files has a trailing comma.
    text = str(node.value).rstrip(",")
    if isinstance(node.value, bool) or not text.isdecimal() or int(text) < 1:
        raise ConfigError(
            "must be an integer of at least 1",
            key=f"{section}.{key}",
            value=plain_value(node),
            place=node.place,
        )
    return int(text)
