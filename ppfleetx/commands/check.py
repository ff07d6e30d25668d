"""Implement ``ppfleetx check`` and ``train --check``: print a report on a configuration, with its parallel
plan, parameters, batch sizes and memory. Needs neither Paddle nor a device.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from ppfleetx.commands.initialize import refuse_foreign_weights
from ppfleetx.config.ineffective_options import absent_loggers, missing, without_effect
from ppfleetx.config.loader import ConfigSource, load_config
from ppfleetx.config.mesh import EXPERT_AXES, Mesh
from ppfleetx.config.message_text import bytes_text, counted, runs_of
from ppfleetx.config.parallel_plan import AXES, ParallelPlan
from ppfleetx.config.reading.overrides import Override
from ppfleetx.config.registries import SCHEDULES
from ppfleetx.config.sections.engine import EngineConfig
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.config.sections.root import RunConfig
from ppfleetx.models.gpt.spec import (
    active_count,
    flops_per_step,
    parameter_count,
    parameter_specs,
    trained_count,
)
from ppfleetx.nn.cpu_ops.compiled import obstacle
from ppfleetx.optims.param_groups import group_rows
from ppfleetx.optims.schedules import build_schedule
from ppfleetx.planner.job import mean_states
from ppfleetx.planner.report import memory_lines
from ppfleetx.utils.device_support import CPU, GPU, expected_device, not_supported_reasons
from ppfleetx.utils.gpu_operators import host_operator_notes

_MAX_GROUPS_SHOWN = 2
_MAX_RANKS_SHOWN = 8
_RANKS_PER_NODE = 8
_BLOCK = re.compile(r"(decoder\.layers\.)(\d+)(\..*)")


def check(config: ConfigSource, overrides: Sequence[Override], *, world_size: int | None = None) -> None:
    """Print a report on a configuration. Raises UserError if a run would be refused. ``world_size`` is the
    number of processes; None: as many as the plan needs."""
    from ppfleetx.core.engine.check_output_dir import check_start
    from ppfleetx.data.corpus_checks import token_id_lines

    cfg = load_config(config, overrides, world_size=world_size)
    report = check_report(cfg)
    if cfg.Data.Train is not None:
        check_start(cfg)
    token_ids = token_id_lines(cfg)
    # Print after all checks, because the report says that the configuration is valid.
    print("\n".join([report, *token_ids]))


def check_report(cfg: RunConfig, device: str | None = None) -> str:
    """Return a report on the configuration: plan, parameters, batches, FLOPs, precision, recomputation,
    memory and schedules. ``device`` is the device of the run; None: ``Global.device``, where ``auto`` counts
    as a GPU. Raises UserError if the configuration names weights that must be converted first, or has invalid
    callbacks or an invalid schedule."""
    refuse_foreign_weights(cfg)
    if cfg.Engine.callbacks != EngineConfig().callbacks:
        from ppfleetx.core.engine.callbacks.build import check_callbacks  # seldom needed

        check_callbacks(cfg.Engine.callbacks)
    if cfg.Optimizer.lr.decay_steps is not None:  # otherwise the data determine the schedule's length
        build_schedule(cfg.Optimizer, cfg.Optimizer.lr.in_units(cfg.Engine.max_steps, cfg.batch))
    precision = _precision(cfg, device) if device else _precision_before_start(cfg)
    device = device or (GPU if cfg.Global.device == "auto" else cfg.Global.device)
    lines = [
        *_plan_lines(cfg),
        *_model_lines(cfg.Model),
        *_batch_lines(cfg),
        _line("precision", precision),
        *([_line("offload", _offload(cfg))] if cfg.plan.sharding_offload else []),
        *_group_lines(cfg),
        _line("recompute", _recompute(cfg.Model)),
        *(_line("" if number else "memory", text) for number, text in enumerate(memory_lines(cfg, device))),
        _line("learning rate", _schedule(cfg)),
        _line("run", _run(cfg)),
        *(_line("starts from", text) for text in _start(cfg)),
    ]
    notes = (*cfg.warnings, *without_effect(cfg), *host_operator_notes(cfg, device))
    loggers = (f"Engine.loggers: {name} needs {wanted}" for name, wanted in absent_loggers(cfg).items())
    lines += [_line("note", note) for note in notes]
    lines += [_line("missing", reason) for reason in (*missing(cfg), *loggers)]
    lines += [_line("not yet", reason) for reason in not_supported_reasons(cfg, device)]
    return "\n".join([*lines, "The configuration is valid."])


def human_count(number: int) -> str:
    """Format a count for people: ``174_615_846_912`` becomes ``174.6 B``."""
    for size, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return str(number)


def _line(name: str, text: str) -> str:
    return f"{name:<14} {text}"


def _plan_lines(cfg: RunConfig) -> Iterator[str]:
    plan = cfg.plan
    yield _line("plan", str(plan))
    yield _line("world size", f"{plan.world_size} = " + " x ".join(f"{a} {getattr(plan, a)}" for a in AXES))
    mesh, of_experts = Mesh(plan), () if cfg.Model.moe is None else EXPERT_AXES
    for axis in (axis for axis in (*AXES, *of_experts) if mesh.size_of(axis) > 1):
        groups = mesh.groups_over((axis,)) if axis in of_experts else plan.iter_groups(axis)
        yield _line(f"  {axis} ranks", _groups(groups, plan.world_size, mesh.size_of(axis)))
    if plan.pp > 1:
        yield from _pipeline_lines(cfg, plan)


def _groups(groups: Iterable[Sequence[int]], world_size: int, size: int) -> str:
    count = world_size // size
    shown = ", ".join(_ranks(group) for group in islice(groups, _MAX_GROUPS_SHOWN))
    more = ", ..." if count > _MAX_GROUPS_SHOWN else ""
    return f"{counted(count, 'group')} of {size}: {shown}{more}"


def _ranks(group: Sequence[int]) -> str:
    if len(group) <= _MAX_RANKS_SHOWN:
        return str(list(group))
    return f"[{group[0]}, {group[1]}, {group[2]}, ..., {group[-1]}]"


def _pipeline_lines(cfg: RunConfig, plan: ParallelPlan) -> Iterator[str]:
    chunks = plan.layers_of_chunks(cfg.Model.num_layers)
    stages = [chunks[stage :: plan.pp] for stage in range(plan.pp)]
    if len(set(chunks)) == 1:
        per_stage = sum(stages[0])
        text = f"{plan.pp} stages of {counted(per_stage, 'layer')}"
        if plan.virtual_pp_degree > 1:
            text += f" ({plan.virtual_pp_degree} chunks of {chunks[0]})"
    else:
        text = f"stages of {', '.join('+'.join(map(str, stage)) for stage in stages)} layers"
    idle = bubble_share(plan, cfg.batch.accumulate_steps)
    micro_batches = f"{counted(cfg.batch.accumulate_steps, 'micro batch')} per step"
    yield _line("pipeline", text)
    yield _line("bubble", f"{idle:.1%} of the time is idle ({micro_batches})")


def bubble_share(plan: ParallelPlan, micro_batches: int) -> float:
    """Return the pipeline bubble: the fraction of time for which a stage is idle, if all stages take equally
    long (Narayanan et al. 2021; for ZB-H1, Qi et al. 2023, table 2)."""
    if plan.pp_schedule == "zb_h1":
        # This assumes that the forward pass and the two parts of the backward pass (gradients of the inputs
        # and of the weights) take equally long.
        return (plan.pp - 1) / (3 * micro_batches + plan.pp - 1)
    return (plan.pp - 1) / (plan.virtual_pp_degree * micro_batches + plan.pp - 1)


def _model_lines(model: ModelConfig) -> Iterator[str]:
    count = parameter_count(model)
    heads = f"{counted(model.num_attention_heads, 'head')} of {model.head_size}"
    if model.kv_heads != model.num_attention_heads:
        heads += f" ({counted(model.kv_heads, 'key/value head')})"
    if model.latent_attention is not None:
        heads += f" (latent, {model.latent_attention.kv_rank} + {model.latent_attention.rope_head_dim})"
    vocabulary = f"vocabulary {model.vocab_size} (padded {model.padded_vocab_size})"
    layers = f"{counted(model.num_layers, 'layer')}, hidden {model.hidden_size}, {heads}"
    ffn = f"ffn {model.ffn_size} {model.hidden_act}"
    positions = f"positions {model.max_position_embeddings} ({_positions(model)})"
    yield _line("model", f"{layers}, {ffn}, {vocabulary}, {positions}")
    yield _line("parameters", f"{human_count(count)} parameters ({count:,})")
    if (moe := model.moe) is not None:
        mixtures, active = moe.mixture_layers(model.num_layers), active_count(model)
        shared = "" if moe.shared_experts is None else f" and a shared one of {moe.shared_experts.ffn_size}"
        text = f"{moe.top_k} of {moe.num_experts} of width {moe.expert_ffn_size or model.ffn_size}{shared}"
        text += f" in {counted(len(mixtures), 'layer')}"
        yield _line("experts", f"{text}: {human_count(active)} parameters are active ({active:,})")
    if (lora := model.lora) is not None:
        trained = trained_count(model)
        base = "" if lora.base is None else f"; the others come from {lora.base} and are not saved again"
        text = f"rank {lora.rank}, alpha {lora.alpha:g}: {human_count(trained)} parameters train"
        yield _line("adapters", f"{text} ({trained:,}){base}")
    if model.mup_base_width is not None:
        m = model.width_multiplier
        text = f"{m:g} times the base of {model.mup_base_width}: rates of the blocks' matrices x {1 / m:g}"
        yield _line("width", f"{text}, their initial values x {m**-0.5:g}, logits x {model.logits_factor:g}")


def _positions(model: ModelConfig) -> str:
    kind, scaling = model.position_embedding_type, model.rope_scaling
    return kind if scaling is None else f"{kind}, {scaling.type} times {scaling.factor:g}"


def _batch_lines(cfg: RunConfig) -> Iterator[str]:
    batch, plan = cfg.batch, cfg.plan
    local = batch.local_batch_size
    ranks = f"{plan.data_size} data ranks (dp {plan.dp} x sharding {plan.sharding})"
    yield _line("batch", f"global {batch.global_batch_size} = local {local} x {ranks}")
    yield _line("", f"local {local} = micro {batch.micro_batch_size} x accumulate {batch.accumulate_steps}")
    if cfg.Data.Train is not None:
        length = cfg.Data.Train.dataset.max_seq_len
        tokens = batch.global_batch_size * length
        flops = flops_per_step(cfg.Model, batch.global_batch_size, length)
        yield _line("tokens", f"{tokens:,} per step (sequences of {length})")
        yield _line("compute", f"{flops:.4e} FLOPs per step, {flops / plan.world_size:.4e} per device")
    most = batch.consumed_after(cfg.Engine.max_steps)
    for name, ramp in {"batch ramp": batch.ramp, "length ramp": batch.lengths}.items():
        if ramp is not None:
            samples = counted(ramp.samples, "sequence", ",")
            ends = "" if most >= ramp.samples else f"; the run ends within, at {most:,}"
            yield _line(name, f"from {ramp.start} by {ramp.increment} to {ramp.full} in {samples}{ends}")


def _precision_before_start(cfg: RunConfig) -> str:
    """Describe the precision of a run. With ``Global.device: auto``, this is the precision on GPUs. If this
    machine has only a CPU and its precision differs, the text names both."""
    if cfg.Global.device != "auto":
        return _precision(cfg, cfg.Global.device)
    on_gpus, on_cpu = _precision(cfg, GPU), _precision(cfg, CPU)
    if on_gpus == on_cpu or expected_device("auto") != CPU:
        return on_gpus
    return f"on GPUs {on_gpus}; on this machine's CPU {on_cpu}"


def _precision(cfg: RunConfig, device: str) -> str:
    precision = cfg.Engine.mix_precision
    if not precision.enable:
        return "float32"
    missing = obstacle(precision.dtype) if device == CPU else None
    if missing is not None and precision.enable == "auto":
        return f"float32 (Engine.mix_precision.enable is auto: {missing})"
    text = f"{precision.dtype} {precision.level}"
    if missing is not None:
        text += f", which cannot start here: {missing}"
    if precision.dtype == "float16":
        kind = "dynamic, starting at" if precision.use_dynamic_loss_scaling else "constant"
        text += f", loss scale {kind} {precision.scale_loss:g}"
    return text + (", gradients summed in float32" if precision.main_grad_fp32 else "")


def _offload(cfg: RunConfig) -> str:
    """Describe how much host memory the offloaded optimizer states need. The figures assume that tensor and
    pipeline parallelism divide all parameters evenly."""
    plan, precision = cfg.plan, cfg.Engine.mix_precision
    moments = 4 * mean_states(cfg)
    masters = 4 if precision.enable and precision.level == "O2" else 0
    size = moments + masters
    if size == 0:
        return f"{cfg.Optimizer.name} without master weights has no states: the host holds nothing"
    rank_bytes = int(trained_count(cfg.Model) * size / (plan.mp * plan.pp * plan.sharding))
    ranks = min(plan.world_size, _RANKS_PER_NODE)
    return (
        f"optimizer states in host memory, {size:.3g} bytes a parameter: about {bytes_text(rank_bytes)} a "
        f"rank, {bytes_text(rank_bytes * ranks)} on a node with {counted(ranks, 'rank')}"
    )


def _recompute(model: ModelConfig) -> str:
    count = len(model.recomputed_layers())
    if count == 0:
        return "none"
    return f"{model.recompute_granularity or 'full'}, {count} of {model.num_layers} layers"


def _group_lines(cfg: RunConfig) -> list[str]:
    rows = group_rows(cfg.Optimizer, parameter_specs(cfg.Model, cfg.Compress).values(), cfg.origins)
    decay = cfg.Optimizer.layer_decay
    by_layer = [] if decay == 1.0 else [_line("layer decay", f"{decay:g} towards the input, of the rates")]
    if len(rows) == 1 and not cfg.Optimizer.groups:
        return by_layer
    lines = []
    for row in rows:
        lines.append(
            f"{row.optimizer}{f', {row.settings}' if row.settings else ''}: "
            f"{counted(len(row.names), 'parameter')} of {human_count(row.num_elements)} ({row.name})"
        )
        lines += [f"  {name}" for name in _with_merged_blocks(row.names)]
    return by_layer + [_line("" if number else "optimizer", text) for number, text in enumerate(lines)]


def _with_merged_blocks(names: Iterable[str]) -> list[str]:
    """Merge parameter names that differ only in the layer number, into names such as
    ``decoder.layers.0-11.mlp.fc1.weight``."""
    blocks: dict[tuple[str, str], list[int]] = {}
    for name in names:
        found = _BLOCK.match(name)
        before, number, after = found.groups() if found else (name, None, "")
        numbers = blocks.setdefault((before, after), [])
        if number is not None:
            numbers.append(int(number))
    return [f"{before}{_shown(numbers)}{after}" for (before, after), numbers in blocks.items()]


def _shown(numbers: Iterable[int]) -> str:
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs_of(numbers))


def _schedule(cfg: RunConfig) -> str:
    lr = cfg.Optimizer.lr
    if lr.decay_steps is None:
        return f"{lr.decay_style} from {lr.max_lr:g} to {lr.min_lr:g} over all epochs"
    warmup = counted(math.ceil(round(lr.warmup_length, 6)), f"warm-up {lr.unit}")
    text = f"{warmup} to {lr.max_lr:g}, {lr.decay_style}"
    if SCHEDULES.traits(lr.decay_style).decays:
        text += f" to {lr.min_lr:g} at {lr.unit} {lr.decay_steps}"
    steps = cfg.Engine.max_steps
    length = steps if lr.unit == "step" else cfg.batch.consumed_after(steps)
    return f"{text}; the run ends within the warm-up" if length < lr.warmup_length else text


def _start(cfg: RunConfig) -> Iterator[str]:
    """Describe the checkpoints that the run starts from, if it names any."""
    for key, path in cfg.weight_sources():
        is_here = os.path.exists(path)  # noqa: PTH110 (Path.exists raises PermissionError)
        yield _STARTS[key].format(path) + ("" if is_here else ", which is not here")


_STARTS = {
    "Engine.save_load.ckpt_dir": "the run in {}",
    "Engine.save_load.init_from": "the weights of {}",
    "Model.lora.base": "the frozen weights of {}",
}


def _run(cfg: RunConfig) -> str:
    engine = cfg.Engine
    unit = "step" if engine.run_mode == "step" else "epoch"
    length = counted(engine.max_steps if unit == "step" else engine.num_train_epochs, unit)
    in_epochs = unit == "epoch" and engine.save_load.save_epoch is not None
    save = engine.save_load.save_epoch if in_epochs else engine.save_load.save_steps
    evaluates = cfg.Data.Eval is not None and engine.eval_freq
    evaluation = f"evaluate every {counted(engine.eval_freq, unit)}" if evaluates else "no evaluation"
    saving = (
        f"save every {counted(save, 'epoch' if in_epochs else 'step')} and at the end"
        if save
        else "save at the end"
    )
    return f"{length}, {evaluation}, {saving}, on {cfg.Global.device}"
