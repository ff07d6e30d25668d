"""Rules between configuration sections: finetuning, sequence lengths, compression, fused operators."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ppfleetx.config.errors import ConfigError, RuleError
from ppfleetx.config.parallel_plan import AXES, CONFIG_KEYS, ParallelPlan, Workload, violations
from ppfleetx.config.registries import modules_that
from ppfleetx.config.sections.compress import PruneConfig, num_to_remove
from ppfleetx.config.sections.data import GLUE_OUTPUTS, MODES, DatasetConfig
from ppfleetx.config.sections.model import FusedName, ModelConfig
from ppfleetx.config.sections.root import RunConfig


def glue_task(cfg: RunConfig) -> str | None:
    """The GLUE task that the datasets of the configuration name, or None."""
    return next((dataset.name for _, dataset in _datasets(cfg) if dataset.is_glue), None)


def num_outputs(cfg: RunConfig) -> int:
    """The number of outputs of the classification head: ``Model.num_classes`` or else the number of classes
    of the GLUE task."""
    return cfg.Model.num_classes or GLUE_OUTPUTS[glue_task(cfg)]


def check_one_process(cfg: RunConfig, what: str, processes: int = 1) -> None:
    """Raise ConfigError if the parallel plan has several ranks or the job has several processes.

    Args:
        what: the name of the program, for the message.
        processes: the number of processes that the launcher has started.
    """
    if cfg.plan.world_size > 1 or processes > 1:
        raise ConfigError(
            f"{what} runs in one process with the whole model, unlike the plan ({cfg.plan}). A checkpoint of "
            "any plan loads: set the degrees to 1, and start it without the launcher",
            key="Distributed",
            place=cfg.origins.get("Distributed"),
        )


def finetuning_violations(cfg: RunConfig) -> Iterator[RuleError]:
    yield from _texts(cfg)
    if cfg.Engine.save_load.keep_best and not (cfg.Data.Eval is not None and cfg.Engine.eval_freq):
        yield RuleError(
            ("Engine.save_load.keep_best", "Engine.eval_freq"),
            "the best is found by evaluating: give Data.Eval, and Engine.eval_freq of at least 1",
        )
    if cfg.Model.task.classifies:
        yield from _task(cfg)
    yield from _plan(cfg)
    if cfg.Engine.save_load.keep_best == "metric" and not cfg.Model.task.has_metrics:
        yield RuleError(
            ("Engine.save_load.keep_best", "Model.module"),
            f"only {modules_that('has_metrics')} has a metric; "
            "causal language models can keep the best by loss",
        )


def _datasets(cfg: RunConfig) -> Iterator[tuple[str, DatasetConfig]]:
    for mode, section in cfg.Data.sections(*MODES):
        yield f"Data.{mode}.dataset", section.dataset


def _texts(cfg: RunConfig) -> Iterator[RuleError]:
    for key, dataset in _datasets(cfg):
        if dataset.is_glue and not cfg.Model.task.classifies:
            yield RuleError(
                (f"{key}.name", "Model.module"),
                f"a GLUE task is learned by Model.module = {modules_that('classifies')}, "
                f"not by {cfg.Model.module}",
            )


def _task(cfg: RunConfig) -> Iterator[RuleError]:
    task, classes = glue_task(cfg), cfg.Model.num_classes
    for key, dataset in _datasets(cfg):
        if dataset.name != task:
            wanted = "a GLUE task" if task is None else f"the same task everywhere, here {task}"
            yield RuleError((f"{key}.name",), f"{cfg.Model.module} learns {wanted}")
    if task is None and classes is None:
        yield RuleError(("Model.num_classes",), "is needed where no section of Data names a GLUE task")
    if task is not None and classes not in (None, GLUE_OUTPUTS[task]):
        what = f"has {GLUE_OUTPUTS[task]} classes"
        if GLUE_OUTPUTS[task] == 1:
            what = "predicts a number: 1 output"
        yield RuleError(("Model.num_classes",), f"{task} {what}; null takes the task's own number")


def _plan(cfg: RunConfig) -> Iterator[RuleError]:
    *first, last = [axis for axis in AXES if axis not in cfg.Model.task.refused_axes]
    for axis in cfg.Model.task.refused_axes:
        if getattr(cfg.plan, axis) > 1:
            yield RuleError(
                (f"Distributed.{axis}_degree", "Model.module"),
                f"{cfg.Model.module} runs under {', '.join(first)} and {last}; {axis} must be 1",
            )


def used_lengths(cfg: RunConfig) -> dict[str, int]:
    """Return the sequence length in tokens of each dataset that the run reads, by configuration key.

    If the length grows in training, the result also has the key ``Global.rampup_seq_len``. Its value divides
    every length that training uses.
    """
    if cfg.Model.task.offline_evaluation:
        return {"Offline_Eval.max_seq_len": cfg.Offline_Eval.max_seq_len}
    splits = {"Train": cfg.Data.Train, "Eval": cfg.Data.Eval}
    if cfg.Model.task.classifies:
        splits["Test"] = cfg.Data.Test
    lengths = {
        f"Data.{name}.dataset.max_seq_len": split.dataset.max_seq_len
        for name, split in splits.items()
        if split is not None
    }
    if cfg.Global.rampup_seq_len is not None:  # a divisor of start and increment divides every length
        lengths["Global.rampup_seq_len"] = math.gcd(*cfg.Global.rampup_seq_len[:2])
    return lengths


def workload_of(cfg: RunConfig, accumulate_steps: int | None = None) -> Workload:
    """Return the properties of a run that decide whether a parallel plan is legal.

    ``seq_len`` is the greatest common divisor of all sequence lengths in the run.
    """
    seq_len = math.gcd(*used_lengths(cfg).values()) or None
    return model_workload(
        cfg.Model, seq_len, accumulate_steps, needs_whole_matrices=cfg.Optimizer.needs_whole_matrices
    )


def model_workload(
    model: ModelConfig, seq_len: int | None, accumulate_steps: int | None, *, needs_whole_matrices: bool
) -> Workload:
    """Return the properties of a model and its training that decide whether a parallel plan is legal. An
    argument of None is unknown, and rules about it are not checked."""
    moe = model.moe
    return Workload(
        num_layers=model.num_layers,
        num_heads=model.num_attention_heads,
        num_groups=model.kv_heads,
        ffn_size=model.ffn_size,
        padded_vocab=model.padded_vocab_size,
        seq_len=seq_len,
        accumulate_steps=accumulate_steps,
        num_experts=moe.num_experts if moe else 0,
        expert_size=(moe.expert_ffn_size or model.ffn_size) if moe else None,
        needs_whole_matrices=needs_whole_matrices,
    )


def sequence_length(cfg: RunConfig) -> int:
    """The length of a training sequence in tokens; without training data, the model's context length."""
    return cfg.Data.Train.dataset.max_seq_len if cfg.Data.Train else cfg.Model.max_position_embeddings


def expert_message_bytes(cfg: RunConfig) -> float:
    """The mean size in bytes of a message from one rank to another in an expert-parallel group. The message
    holds the hidden states that one layer sends to the experts on the other rank."""
    model, plan = cfg.Model, cfg.plan
    rows = cfg.batch.micro_batch_size * sequence_length(cfg) * model.moe.top_k / (plan.sep * plan.mp)
    return rows / plan.ep * model.hidden_size * (2 if cfg.Engine.mix_precision.enable else 4)


def length_violations(cfg: RunConfig, plan: ParallelPlan) -> Iterator[RuleError]:
    """Yield an error for each rule that ``plan`` breaks because of a sequence length of the run."""
    written_as = CONFIG_KEYS["seq_len"]
    for key, length in used_lengths(cfg).items():
        for broken in violations(plan, Workload(seq_len=length)):
            if written_as in broken.keys:
                keys = tuple(key if name == written_as else name for name in broken.keys)
                yield RuleError(keys, broken.rule)


def position_violations(cfg: RunConfig) -> Iterator[RuleError]:
    """Yield an error for each length of data or generated text that exceeds ``max_position_embeddings``."""
    longest, position_key = cfg.Model.max_position_embeddings, "Model.max_position_embeddings"
    for key, length in used_lengths(cfg).items():
        if length > longest:
            yield RuleError(
                (key, position_key), f"sequences of {length} tokens exceed max_position_embeddings {longest}"
            )
    if cfg.Model.task.for_generation and cfg.Generation.max_dec_len >= longest:
        yield RuleError(
            ("Generation.max_dec_len", position_key),
            f"{cfg.Generation.max_dec_len} new tokens and a prompt exceed max_position_embeddings {longest}",
        )


def optimizer_violations(cfg: RunConfig) -> Iterator[RuleError]:
    others = sorted(cfg.Optimizer.names - {"AdamW"})
    if cfg.Model.mup_base_width is not None and others:
        yield RuleError(
            ("Model.mup_base_width", "Optimizer.name"),
            f"the rule that divides rates by the width is AdamW's; {others[0]} would need another",
        )


_SECTION = "Compress.Quantization"


def compression_violations(cfg: RunConfig) -> Iterator[RuleError]:
    quantization = cfg.Compress.Quantization
    if quantization is not None:
        for broken in quantization.unknown_layers(cfg.Model.num_layers, cfg.Model.block_linears()):
            yield RuleError([f"{_SECTION}.{key}" for key in broken.keys], broken.rule)
    if cfg.Compress.pruning is not None:
        yield from _pruning(cfg, cfg.Compress.pruning)
    if cfg.Model.moe is not None and cfg.Compress.quantization is not None and cfg.plan.emp > 1:
        yield RuleError(
            (f"{_SECTION}.enable", "Distributed.expert_mp_degree", "Distributed.mp_degree"),
            "experts whose matrices are sliced are not trained with quantization; set expert_mp_degree to 1",
        )
    if cfg.Compress.Distill is not None and cfg.Model.task.classifies:
        keys = ("Compress.Distill", "Model.module")
        yield RuleError(keys, "language models are distilled, not classifiers")


def _pruning(cfg: RunConfig, pruning: PruneConfig) -> Iterator[RuleError]:
    key, model = "Compress.Prune", cfg.Model
    if model.lora is not None:
        yield RuleError(
            (f"{key}.enable", "Model.lora"),
            "the weights below adapters are not trained, so they are not pruned while training; prune the "
            "checkpoint first (ppfleetx prune), or merge the adapters (ppfleetx merge)",
        )
    if model.why_not_prunable is not None:
        other, why = model.why_not_prunable
        yield RuleError((f"{key}.enable", f"Model.{other}"), why)
    totals = {"heads": model.kv_heads, "mlp": model.ffn_size}
    pruned = [part for part in totals if pruning.part in (part, "both")]
    if "heads" in pruned and model.kv_heads == 1:
        yield RuleError(
            (f"{key}.part", "Model.num_query_groups"),
            "each layer has one key/value head only, which stays; set part to mlp",
        )
    elif not any(num_to_remove(totals[part], pruning.ratio) for part in pruned):
        what = {"heads": f"{model.kv_heads} key/value heads", "mlp": f"{model.ffn_size} feed-forward units"}
        yield RuleError((f"{key}.ratio",), f"removes none of {' and '.join(what[part] for part in pruned)}")
    if pruning.last_step >= cfg.Engine.max_steps:
        last = "begin_step" if pruning.end_step is None else "end_step"
        yield RuleError((f"{key}.{last}", "Engine.max_steps"), "training ends before everything is removed")


_MIXED = "Engine.mix_precision."

Reason = tuple[tuple[str, ...], str]
"""The configuration keys that cause a problem, and an explanation."""


def unusable_fused_ops(cfg: RunConfig) -> dict[FusedName, Reason]:
    """Return the fused operators that a run with this configuration cannot use, each with the reason. Only
    operators for matrix products are considered. The result is empty for runs in float32."""
    mixed = cfg.Engine.mix_precision
    if not mixed.enable:
        return {}
    names: tuple[FusedName, ...] = ("linear_grad_add", "weight_cast")
    if cfg.Compress.quantization is not None:
        why = "layers multiply by weights that are rounded for each product"
        return dict.fromkeys(names, (("Compress.Quantization.enable",), why))
    found: dict[FusedName, Reason] = {}
    if mixed.level == "O1":
        found["linear_grad_add"] = (
            (_MIXED + "level",),
            "at O1 weights are float32, and so are their gradients",
        )
    elif not mixed.main_grad_fp32:
        found["linear_grad_add"] = (_MIXED + "main_grad_fp32",), "gradients are to be added in 16 bits"
    sharding = cfg.Distributed.sharding
    if mixed.level == "O2":
        found["weight_cast"] = (_MIXED + "level",), "at O2 weights are held in 16 bits"
    elif mixed.matmuls_in_float32:
        found["weight_cast"] = (_MIXED + "custom_black_list",), "products are to be computed in float32"
    elif sharding.sharding_degree > 1 and sharding.sharding_stage == 3:
        key = "Distributed.sharding.sharding_stage"
        found["weight_cast"] = (key,), "stage 3 drops values after each use, and copies of them would stay"
    return found


def fused_violations(cfg: RunConfig) -> Iterator[RuleError]:
    """Yield an error for each operator listed in ``Model.fused_ops`` that the run cannot use."""
    listed = () if isinstance(cfg.Model.fused_ops, str) else cfg.Model.fused_ops
    for name, (keys, why) in unusable_fused_ops(cfg).items():
        if name in listed:
            yield RuleError(
                ("Model.fused_ops", *keys), f"{name} would not be used: {why}; leave it out of the list"
            )
