"""Joint rules: which processes there are, what each of them computes, and how many sequences a step has."""

from __future__ import annotations

import re

from ppfleetx.dialects.given import Given
from ppfleetx.dialects.mindformers.arguments import RUN_MODES
from ppfleetx.dialects.reading import Reading
from ppfleetx.dialects.translation import Translation
from ppfleetx.utils.devices import CPU, GPU, NPU, expected_device, of_recipe

_DEVICES = {"Ascend": NPU, "GPU": GPU, "CPU": CPU}
_TYPES = ("float32", "float16", "bfloat16")
_DECIDING = ("num_experts_chosen", "aux_loss_factor", "capacity_factor", "norm_topk_prob")
_EXPERTS = frozenset(
    f"moe_config.{name}"
    for name in (
        *_DECIDING, "expert_num", "routing_policy", "expert_group_size", "group_wise_a2a",
        "comp_comm_parallel", "comp_comm_parallel_degree",
    )
)  # fmt: skip
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*GB", re.ASCII)


def run_mode(reading: Reading) -> str:
    """What is to be done."""
    return reading.choice("run_mode", RUN_MODES, "train")


def device(reading: Reading, result: Translation) -> None:
    """``Global.device``, and 16-bit computation where the device has it."""
    target = reading.choice("context.device_target", _DEVICES, "Ascend")
    chosen, why = of_recipe(NPU) if target == "Ascend" else (_DEVICES[target], "")
    result.put("Global.device", chosen, *reading.origins("context.device_target"), why=why)
    on_cpu = chosen == CPU or (chosen == "auto" and expected_device("auto") == CPU)
    _memory_limit(reading, result, has_limit=not on_cpu and chosen != NPU)
    _precision(reading, result, on_cpu)


def _memory_limit(reading: Reading, result: Translation, *, has_limit: bool) -> None:
    key = "context.max_device_memory"
    text = reading.text(key)
    if text is None:
        return
    size = _SIZE.fullmatch(text.strip())
    if size is None:
        raise reading.error(key, 'must be a size like "31GB"')
    if not has_limit:
        result.unused.append(reading.given[key])
        return
    megabytes = int(float(size[1]) * 1024)
    result.put("Global.flags.FLAGS_gpu_memory_limit_mb", megabytes, *reading.origins(key))


def _precision(reading: Reading, result: Translation, on_cpu: bool) -> None:
    softmax_names = [f"model.model_config.softmax_{word}" for word in ("compute_type", "dtype")]
    names = [
        "model.model_config.compute_dtype",
        next(filter(reading.__contains__, softmax_names), softmax_names[1]),
    ]
    compute, softmax = (reading.choice(name, _TYPES, "float32") for name in names)
    if names[0] not in reading:
        compute = "float16"  # the default of GPT2Config
    weights_key = "model.model_config.param_init_type"
    weights = reading.choice(weights_key, _TYPES, "float32")
    origins = reading.origins(names[0])
    why = "" if origins else "the default of GPT2Config"
    result.put("Model.softmax_in_fp32", softmax == "float32", *reading.origins(names[1]))
    if compute == "float32":
        if weights != "float32":
            raise reading.conflict(
                (weights_key, names[0]), "weights in 16 bits need a compute_dtype of 16 bits"
            )
        result.put("Engine.mix_precision.enable", False, *origins)
        return
    if on_cpu:
        result.put("Engine.mix_precision.enable", False, *origins, why="a CPU computes in float32")
        result.notes.append(f"compute_dtype {compute} is for accelerators: this CPU computes in float32")
        return
    result.put("Engine.mix_precision.enable", True, *origins, why=why)
    result.put("Engine.mix_precision.dtype", compute, *origins, why=why)
    result.put("Engine.mix_precision.level", "O2", *reading.origins(weights_key), why="float32 masters")
    result.put("Engine.mix_precision.hysteresis", 1, why="DynamicLossScaleUpdateCell halves at each overflow")


def experts(reading: Reading, result: Translation) -> None:
    """``moe_config``: all layers are mixtures of experts, or none."""
    number = reading.integer("moe_config.expert_num", 1, least=1)
    parallel = "parallel_config.expert_parallel"
    degree = reading.integer(parallel, 1, least=1)
    if number == 1:
        if degree > 1:
            raise reading.error(parallel, "must be 1: moe_config.expert_num is 1, and there are no experts")
        of_experts = (name for name in reading.given if name.startswith("moe_config."))
        result.unused.extend(reading.given[name] for name in of_experts)
        return
    if other := [name for name in reading.given if name.startswith("moe_config.") and name not in _EXPERTS]:
        raise reading.error(other[0], "is not built")
    chosen, weight, factor, normalize = (f"moe_config.{name}" for name in _DECIDING)
    top_k = reading.integer(chosen, 1, least=1)
    for key, value, name in (
        ("num_experts", number, "moe_config.expert_num"),
        ("top_k", top_k, chosen),
        ("router.normalize", top_k > 1 and reading.flag(normalize, True), normalize),
        ("aux_loss.kind", "switch", weight),
        ("aux_loss.weight", reading.number(weight, 0.05, least=0), weight),
        ("capacity.factor", reading.number(factor, 1.1, least=0), factor),
        ("capacity.policy", "position", factor),
    ):
        why = "" if name in reading else "the default of MoEConfig"
        result.put(f"Model.moe.{key}", value, *reading.origins(name), why=why)
    if degree > 1:
        result.put("Distributed.ep_degree", degree, *reading.origins(parallel))
    result.notes.append(
        "the balancing loss takes the experts' shares from the step before, and capacity is counted in each "
        "sequence, so that neither depends on plan and micro batches, as both do there"
    )


def degrees(reading: Reading, result: Translation) -> None:
    """The plan: ``parallel_config`` where it counts."""
    use = reading.flag("use_parallel", False)
    mode = reading.choice("parallel.parallel_mode", (0, 1, 2, 3), 0)
    data, model, stages = (
        reading.integer(f"parallel_config.{name}", 1, least=1)
        for name in ("data_parallel", "model_parallel", "pipeline_stage")
    )
    is_cut = max(data, model, stages) > 1
    if not use:
        result.put("Distributed.dp_degree", 1, *reading.origins("use_parallel"), why="one process")
        if is_cut:
            result.notes.append("use_parallel is False: one process, and parallel_config is not used")
        return
    if mode > 1:
        raise reading.error(
            "parallel.parallel_mode", "is not built; give 1 and say the degrees in parallel_config, or 0"
        )
    if mode == 0:
        if _divides_optimizer(reading, result):
            raise reading.conflict(
                ("parallel_config.optimizer_shard", "parallel.enable_parallel_optimizer"),
                "with parallel_mode 0 nothing says over how many ranks; give parallel_mode 1, data_parallel",
            )
        if is_cut:
            result.notes.append(
                "parallel_mode is 0: all processes are data-parallel, parallel_config is not used"
            )
        return
    if run_mode(reading) == "predict":
        _to_predict(reading, result, data, model, stages)
        return
    _data_axis(reading, result, data)
    result.put("Distributed.mp_degree", model, *reading.origins("parallel_config.model_parallel"))
    result.put("Distributed.pp_degree", stages, *reading.origins("parallel_config.pipeline_stage"))
    _uneven_stages(reading, result, stages)
    if reading.flag("parallel_config.use_seq_parallel", False) and model > 1:
        result.put("Model.sequence_parallel", True, *reading.origins("parallel_config.use_seq_parallel"))


def _divides_optimizer(reading: Reading, result: Translation) -> bool:
    shard = reading.flag("parallel_config.optimizer_shard")
    parallel = reading.flag("parallel.enable_parallel_optimizer")
    if shard is None:
        return bool(parallel)
    if parallel is not None and parallel != shard:
        result.notes.append(
            f"optimizer_shard {shard} counts and not enable_parallel_optimizer {parallel}, as in MindFormers"
        )
    return shard


def _data_axis(reading: Reading, result: Translation, data: int) -> None:
    origins = reading.origins(
        "parallel_config.data_parallel",
        "parallel_config.optimizer_shard",
        "parallel.enable_parallel_optimizer",
    )
    key = "recompute_config.parallel_optimizer_comm_recompute"
    again = reading.flag(key, False)
    if not _divides_optimizer(reading, result):
        result.put("Distributed.dp_degree", data, *reading.origins("parallel_config.data_parallel"))
        return
    why = "ranks that share the optimizer's states; they divide the batch as well"
    result.put("Distributed.dp_degree", 1, *origins)
    result.put("Distributed.sharding.sharding_degree", data, *origins, why=why)
    result.put("Distributed.sharding.sharding_stage", 3 if again else 1, *reading.origins(key))


def _to_predict(reading: Reading, result: Translation, data: int, model: int, stages: int) -> None:
    """Generation runs neither in pipelines nor with divided optimizers: those ranks are replicas."""
    names = [f"parallel_config.{name}" for name in ("data_parallel", "pipeline_stage")]
    result.put(
        "Distributed.dp_degree", data * stages, *reading.origins(*names), why="replicas take prompts in turn"
    )
    result.put("Distributed.mp_degree", model, *reading.origins("parallel_config.model_parallel"))
    if stages > 1:
        result.notes.append(f"predict: the {stages} pipeline stages are replicas that share out the prompts")


def _uneven_stages(reading: Reading, result: Translation, stages: int) -> None:
    layers = reading.integer("model.model_config.num_layers", least=1)
    if layers is None or layers > 10_000 or layers % stages == 0:
        return
    per_stage = max((layers + 1) // stages, 1)  # the head counts as a layer
    counts = [0] * stages
    for layer in range(layers):
        counts[min(layer // per_stage, stages - 1)] += 1
    origins = reading.origins("parallel_config.pipeline_stage", "model.model_config.num_layers")
    result.put("Distributed.pp_layers", counts, *origins)


def batch(reading: Reading, result: Translation) -> None:
    """Sequences of a forward pass, and of a step on one data-parallel rank."""
    size = reading.integer("runner_config.batch_size", 1, least=1)
    parts = reading.integer("parallel_config.micro_batch_num", 1, least=1)
    in_stages = (
        reading.flag("use_parallel", False)
        and reading.value("parallel.parallel_mode", 0) == 1
        and reading.integer("parallel_config.pipeline_stage", 1, least=1) > 1
    )
    origins = reading.origins("runner_config.batch_size")
    why = "" if origins else "the default"
    result.put("Global.micro_batch_size", size, *origins, why=why)
    if in_stages:
        origins += reading.origins("parallel_config.micro_batch_num")
        result.put("Global.local_batch_size", size * parts, *origins, why="batch_size x micro_batch_num")
        return
    result.put("Global.local_batch_size", size, *origins, why=why)
    if parts > 1:
        where: tuple[Given, ...] = reading.origins("parallel_config.micro_batch_num")
        result.notes.append(
            f"micro_batch_num {parts} ({where[0].place}) is not used: without pipeline stages a step has one "
            "micro batch, as in MindFormers"
        )


def recompute(reading: Reading, result: Translation) -> None:
    """Whole layers are recomputed, or none."""
    key = "recompute_config.recompute"
    if reading.flag(key, False):
        result.put("Model.use_recompute", True, *reading.origins(key))
        result.put("Model.recompute_granularity", "full", *reading.origins(key))
