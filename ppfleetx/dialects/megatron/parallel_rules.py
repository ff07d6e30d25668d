"""Translation rules for Megatron arguments that depend on each other: parallel degrees, pipeline stages,
sharding and activation recomputation."""

from __future__ import annotations

import contextlib
import math
from typing import Any

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.reading.parse import parse_yaml
from ppfleetx.config.reading.tree import plain_value
from ppfleetx.config.sections.distributed import DistributedConfig
from ppfleetx.dialects.megatron.network_rules import PIPELINE, TENSOR
from ppfleetx.dialects.translation import Translation

_ZERO = "deepspeed_config.zero_optimization"


def plan(run: Translation) -> None:
    """Translate Megatron's parallel degrees, pipeline stages and sharding."""
    if run.flag("no_pipeline_parallel", False) and run.integer(PIPELINE, 1) != 1:
        raise run.conflict(("no_pipeline_parallel", PIPELINE), "without a pipeline there is one stage")
    if run.flag("sequence_parallel", False) and run.integer(TENSOR, 1, least=1) > 1:
        run.put("Model.sequence_parallel", True, "sequence_parallel")
    _context(run)
    _chunks(run)
    _sharding(run)


def _context(run: Translation) -> None:
    size = run.integer("context_parallel_size", 1, least=1)
    run.choice("context_parallel_algo", ("ulysses_cp_algo", *_RINGS))
    for name, works in (("context_parallel_algo", "ulysses_cp_algo"), ("cp_comm_type", "a2a")):
        if size > 1 and name in run and run.value(name) != works:
            raise run.error(
                name,
                f"must be {works}, which exchanges parts of sequences for heads; rings and hybrids are not "
                "supported",
            )
    degree = run.integer("ulysses_degree_in_cp", least=1)
    if degree is not None and degree != size:
        raise run.conflict(
            ("ulysses_degree_in_cp", "context_parallel_size"),
            "all of context parallelism exchanges heads: give both the same value",
        )
    if size > 1 and "context_parallel_algo" not in run and "cp_comm_type" not in run:
        run.notes.append(
            "context parallelism exchanges sequence parts for heads (a2a); there the default is a ring"
        )


_HYBRIDS = ("hybrid_cp_algo", "adaptive_cp_algo", "hybrid_adaptive_cp_algo")
_RINGS = ("megatron_cp_algo", *_HYBRIDS, "colossalai_cp", "flash_sp")


def _chunks(run: Translation) -> None:
    stages = run.integer(PIPELINE, 1, least=1)
    layers = run.integer("num_layers", least=1)
    rows = _number_lists(run, "num_layer_list")
    empty = _ids(run, "noop_layers")
    if rows is not None and empty:
        raise run.conflict(("num_layer_list", "noop_layers"), "both set the same; give one of them")
    virtual = _virtual(run, stages, layers, rows)
    if virtual > 1:
        names = (
            "virtual_pipeline_model_parallel_size",
            "num_virtual_stages_per_pipeline_rank",
            "num_layers_per_virtual_pipeline_stage",
            "num_layer_list",
        )
        run.put("Model.virtual_pp_degree", virtual, *names)
    if rows is not None and stages > 1:
        run.put("Distributed.pp_layers", rows if len(rows) > 1 else rows[0], "num_layer_list")
    if empty:
        if outside := [place for place in empty if place >= layers]:
            raise run.error("noop_layers", f"place {outside[0]} does not exist: places are 0 to {layers - 1}")
        why = f"num_layers counts {len(empty)} empty places there"
        run.replace("Model.num_layers", layers - len(empty), "num_layers", "noop_layers", why=why)
        if stages > 1:
            run.put("Distributed.noop_layers", empty, "noop_layers")
    _uneven(run, stages, layers)
    _counted_ends(run, stages, layers, virtual)


def _counted_ends(run: Translation, stages: int, layers: int, virtual: int) -> None:
    names = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
    first, last = (int(run.flag(name, False)) for name in names)
    if stages < 2 or not first + last:
        return
    chunks, places = stages * virtual, layers + first + last
    if places % chunks:
        raise run.conflict(names, f"{places} layers and ends do not divide by {chunks} chunks")
    counts = [places // chunks] * chunks
    counts[0] -= first
    counts[-1] -= last
    rows = [counts[at : at + stages] for at in range(0, chunks, stages)]
    run.put("Distributed.pp_layers", rows if virtual > 1 else rows[0], *names)


def _uneven(run: Translation, stages: int, layers: int) -> None:
    names = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
    if not any(name in run for name in names):
        return
    first, last = (run.integer(name, least=0) for name in names)
    between = stages - sum(number is not None for number in (first, last))
    left = layers - (first or 0) - (last or 0)
    if stages < 2 or left < 0 or (left % between if between > 0 else left):
        raise run.conflict(
            names, f"the other {left} layers cannot be shared evenly by the other {between} stages"
        )
    middle = [left // between] * between if between else []
    given = [*([] if first is None else [first]), *middle, *([] if last is None else [last])]
    run.put("Distributed.pp_layers", given, *names)


def _virtual(run: Translation, stages: int, layers: int, rows: list[list[int]] | None) -> int:
    said: dict[str, int] = {}
    for name in ("virtual_pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank"):
        if name in run:
            said[name] = run.integer(name, least=1)
    if rows is not None:
        said["num_layer_list"] = len(rows)
    each = run.integer("num_layers_per_virtual_pipeline_stage", least=1)
    if each is not None:
        name = "num_layers_per_virtual_pipeline_stage"
        if rows is not None:
            if max(max(row, default=0) for row in rows) != each:
                raise run.conflict(
                    (name, "num_layer_list"), f"no chunk of the list has {each} layers as its most"
                )
        elif layers % (stages * each):
            raise run.conflict(
                (name, "num_layers", PIPELINE), f"{layers} layers do not divide by {stages} x {each}"
            )
        else:
            said[name] = layers // (stages * each)
    if len(set(said.values())) > 1:
        found = ", ".join(f"{name} {number}" for name, number in said.items())
        raise run.conflict(tuple(said), f"virtual stages differ: {found}")
    return next(iter(said.values()), 1)


_STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


def _sharding(run: Translation) -> None:
    stages = {name: run.integer(name, least=0) for name in ("zero_stage", f"{_ZERO}.stage") if name in run}
    if run.flag("use_torch_fsdp2", False):
        stages["use_torch_fsdp2"] = 3
    if run.flag("use_megatron_fsdp", False):
        strategy = run.choice("data_parallel_sharding_strategy", _STRATEGIES, _STRATEGIES[0])
        stages["use_megatron_fsdp"] = _STRATEGIES.index(strategy)
    if len(set(stages.values())) > 1:
        raise run.conflict(tuple(stages), "these set different ZeRO stages")
    stage = next(iter(stages.values()), 0)
    names = [*stages]
    if stage > 3:
        raise run.error(names[0], "must be 0, 1, 2 or 3")
    if stage == 0 and run.flag("use_distributed_optimizer", False):
        stage, names = 1, ["use_distributed_optimizer"]
    offload = _offload(run)
    if offload and stage < 2:
        raise run.error(offload, "goes with ZeRO stage 2 or 3")
    if stage == 0:
        return
    origins = run.origins(*names)
    replicas = _replicas(run)
    run.put("Distributed.sharding.sharding_stage", stage, *origins)
    if replicas is None:
        run.notes.append(
            "there, the states are sharded over all data-parallel ranks, whose number is not known here: "
            "give Distributed.sharding.sharding_degree (and dp_degree 1), or the number of processes"
        )
        return
    run.put("Distributed.sharding.sharding_degree", replicas, *origins, why=f"of {run.world_size} processes")
    run.put("Distributed.dp_degree", 1, *origins, why="every replica holds a share")
    if offload and replicas > 1:
        run.put("Distributed.sharding.sharding_offload", True, offload)


def _offload(run: Translation) -> str | None:
    if run.flag("cpu_optimizer", False):
        return "cpu_optimizer"
    device = f"{_ZERO}.offload_optimizer.device"
    if device in run and run.choice(device, ("cpu", "none")) == "cpu":
        return device
    return f"{_ZERO}.cpu_offload" if run.flag(f"{_ZERO}.cpu_offload", False) else None


def _replicas(run: Translation) -> int | None:
    names = (TENSOR, "model_parallel_size", PIPELINE, "context_parallel_size")
    model = math.prod(run.integer(name, 1, least=1) for name in names)
    if run.world_size is None:
        return None
    if run.world_size % model:
        raise run.conflict(
            [name for name in names if run.integer(name, 1) > 1],
            f"tensor x pipeline x context = {model} processes do not divide the {run.world_size} of the job",
        )
    return run.world_size // model


def recomputation(run: Translation) -> None:
    """Translate Megatron's arguments for activation recomputation."""
    granularity, names = _granularity(run)
    if granularity is None:
        _listed(run)
        return
    if modules := run.value("recompute_modules"):
        words = modules if isinstance(modules, list) else str(modules).replace(",", " ").split()
        if granularity == "selective" and set(words) != {"core_attn"}:
            raise run.error("recompute_modules", "can only be core_attn")
    run.put("Model.use_recompute", True, *names)
    ours = "core_attn" if granularity == "selective" else "full"
    run.put("Model.recompute_granularity", ours, *names)
    method = run.choice("recompute_method", ("uniform", "block"))
    count = run.integer("recompute_num_layers", least=0)
    if method is not None and granularity == "selective":
        raise run.conflict(("recompute_method", *names), "selective recomputation has no method")
    if method == "block" and count is not None:
        layers = _first_of_chunks(run, [count] * len(_chunk_sizes(run)))
        if layers:
            run.put("Model.recompute_layers", layers, "recompute_method", "recompute_num_layers")
        else:
            run.replace("Model.use_recompute", False, "recompute_method", "recompute_num_layers")


def _granularity(run: Translation) -> tuple[str | None, tuple[str, ...]]:
    said = {
        "recompute_granularity": run.choice("recompute_granularity", ("full", "selective")),
        "recompute_activations": "selective" if run.flag("recompute_activations", False) else None,
        "checkpoint_activations": "full" if run.flag("checkpoint_activations", False) else None,
        "recompute": "full" if run.value("recompute") is True else None,
        "select_recompute": "selective" if run.value("select_recompute") is True else None,
    }
    given = {name: value for name, value in said.items() if value is not None}
    if len(set(given.values())) > 1:
        raise run.conflict(tuple(given), "recomputation is full or selective")
    return next(iter(given.values()), None), tuple(given)


def _listed(run: Translation) -> None:
    """Translate ``recompute`` (whole layers) and ``select_recompute`` (only attention) if they are lists.
    Such a list has the number of layers to recompute in each pipeline chunk."""
    found = {}
    for name in ("recompute", "select_recompute"):
        if run.value(name) in (None, False):
            continue
        counts = [number for row in _number_lists(run, name) or [] for number in row]
        if len(counts) != len(_chunk_sizes(run)):
            raise run.error(name, f"needs a number for each of {len(_chunk_sizes(run))} chunks")
        if any(counts):
            found[name] = _first_of_chunks(run, counts)
    if len(found) > 1:
        raise run.conflict(
            tuple(found), "layers are recomputed either all in full or all in part; give one of these"
        )
    for name, layers in found.items():
        run.put("Model.use_recompute", True, name)
        ours = "full" if name == "recompute" else "core_attn"
        run.put("Model.recompute_granularity", ours, name)
        run.put("Model.recompute_layers", layers, name)


def _chunk_sizes(run: Translation) -> list[int]:
    """Return the number of layers of each pipeline chunk, in model order. It is computed from ``run.native``,
    so the number of layers and the pipeline degrees must already be translated."""

    def of(key: str, default: Any) -> Any:
        return run.native[key].value if key in run.native else default

    layers, stages = of("Model.num_layers", 1), of("Distributed.pp_degree", 1)
    virtual, rows = of("Model.virtual_pp_degree", 1), of("Distributed.pp_layers", None)
    if rows is not None:
        return [number for row in rows for number in (row if isinstance(row, list) else [row])]
    empty = of("Distributed.noop_layers", None)
    shared = DistributedConfig.model_construct(pp_degree=stages, pp_layers=None, noop_layers=empty)
    given = shared.layers_of_chunks(layers, virtual)
    return list(given) if given else [layers // (stages * virtual)] * (stages * virtual)


def _first_of_chunks(run: Translation, counts: list[int]) -> list[int]:
    """Return the indices, from 0, of the layers to recompute: the first ``counts[i]`` layers of each pipeline
    chunk i."""
    layers, start = [], 0
    for size, count in zip(_chunk_sizes(run), counts, strict=False):
        layers += range(start, start + min(size, count))
        start += size
    return layers


def _ids(run: Translation, name: str) -> list[int]:
    rows = _number_lists(run, name)
    if rows is not None and len(rows) > 1:
        raise run.error(name, "must be a list of numbers, e.g. 62,63")
    return rows[0] if rows else []


def _number_lists(run: Translation, name: str) -> list[list[int]] | None:
    """Return the value of the option ``name`` as a list of lists of numbers: ``[[4, 4], [4, 2]]`` for the
    string ``[4,4],[4,2]``. A single list or number becomes the only inner list: ``[[3]]`` for 3. Returns None
    if the option is not given."""
    if name not in run:
        return None
    value = run.value(name)
    if isinstance(value, str):  # 1,2 or [1,2] or [1,2],[3,4] or [[1,2],[3,4]]
        with contextlib.suppress(ConfigError):
            value = plain_value(parse_yaml(f"[{value}]", name))
        if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
            value = value[0]
    elif isinstance(value, int) and not isinstance(value, bool):
        value = [value]
    rows = value if isinstance(value, list) and all(isinstance(row, list) for row in value) else [value]
    if not all(
        isinstance(row, list) and all(type(number) is int and number >= 0 for number in row) for row in rows
    ) or not any(rows):
        rule = "must be a list of numbers, or a list of such lists, e.g. [[4,4],[4,2]]"
        raise run.error(name, rule)
    return rows
