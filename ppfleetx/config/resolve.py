"""Fill in the derived values of a configuration, such as batch sizes, and check rules between sections."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from ppfleetx.config.batch_sizes import BatchPlan, Ramp, resolve_batch
from ppfleetx.config.errors import ConfigError, RuleError
from ppfleetx.config.field_types import MAX_RANKS
from ppfleetx.config.message_text import counted
from ppfleetx.config.parallel_plan import AXES, CONFIG_KEYS, ParallelPlan, nearest_plan, violations
from ppfleetx.config.reading.tree import is_argument
from ppfleetx.config.rules import (
    compression_violations,
    finetuning_violations,
    fused_violations,
    glue_task,
    length_violations,
    num_outputs,
    optimizer_violations,
    position_violations,
    workload_of,
)
from ppfleetx.config.section import Section
from ppfleetx.config.sections.data import MODES
from ppfleetx.config.sections.root import RunConfig
from ppfleetx.config.validate import violation_error


def resolve(
    cfg: RunConfig, origins: dict[str, str], warnings: tuple[str, ...], world_size: int | None
) -> RunConfig:
    """Return ``cfg`` with derived values filled in, after checking all rules between sections.

    Args:
        origins: where each value was written, by dotted key.
        world_size: the number of processes of the job; None: unknown.

    Raises:
        ConfigError: a rule is broken, or the parallel plan does not fit ``world_size``.
    """
    given = cfg
    try:
        cfg = _with_data_parallel(cfg, world_size, origins)
        batch, more = _batch_of(cfg, origins)
        cfg = _with_lengths(_with_derived(cfg, batch), origins)
        for violation in _violations(cfg, batch):
            raise violation
    except RuleError as violation:
        raise violation_error(violation, cfg.model_dump(mode="json"), origins) from None
    cfg._batch, cfg._origins, cfg._warnings = batch, origins, (*warnings, *more)
    cfg._derived = frozenset(_filled_in(given, cfg, origins))
    return cfg


def _filled_in(given: Section, resolved: Section, origins: dict[str, str], prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys whose values were derived. ``given`` is a section as the user wrote it, and
    ``resolved`` is the same section with derived values filled in."""
    for name, field in type(given).model_fields.items():
        key, before, after = f"{prefix}{name}", getattr(given, name), getattr(resolved, name)
        if isinstance(before, Section):
            yield from _filled_in(before, after, origins, f"{key}.")
            continue
        default = field.get_default(call_default_factory=True)
        if after != before or (key not in origins and before != default):
            yield key


def _with_data_parallel(cfg: RunConfig, world_size: int | None, origins: dict[str, str]) -> RunConfig:
    _refuse_too_many(cfg.plan, world_size)
    if world_size is None:
        return cfg.changed("Distributed", dp_degree=cfg.Distributed.dp_degree or 1)
    if cfg.Distributed.dp_degree is None:
        rest = cfg.plan.world_size
        if world_size % rest == 0:
            return cfg.changed("Distributed", dp_degree=world_size // rest)
    plan = cfg.plan
    if plan.world_size == world_size:
        return cfg
    near = nearest_plan(plan, world_size, workload_of(cfg))
    given = [
        axis for axis in (*AXES, "ep", "expert_mp") if axis != "dp" or cfg.Distributed.dp_degree is not None
    ]
    needed = f"{'a multiple of ' if cfg.Distributed.dp_degree is None else ''}{plan.world_size}"
    dp = "open" if cfg.Distributed.dp_degree is None else plan.dp
    size = plan.world_size
    more = f" Start {size} with ppfleetx train --nproc {size}, or with a launcher." if world_size == 1 else ""
    raise ConfigError(
        f"{counted(world_size, 'process')} {'was' if world_size == 1 else 'were'} started, but dp {dp} x "
        f"mp {plan.mp} x pp {plan.pp} x sharding {plan.sharding} x sep {plan.sep} needs {needed}.",
        key="Distributed",
        place=origins.get("Distributed"),
        hint=f"The nearest plan for {world_size}: {near} ({_overrides(plan, near, given)}).{more}",
    )


def _overrides(plan: ParallelPlan, near: ParallelPlan, axes: Iterable[str]) -> str:
    """Return the ``-o`` options that turn ``plan`` into the plan ``near``, joined by spaces for a message.
    Only the degrees of ``axes`` are compared."""
    changed = [axis for axis in axes if getattr(plan, axis) != getattr(near, axis)]
    values = {axis: getattr(near, axis) for axis in changed}
    return " ".join(f"-o {CONFIG_KEYS[a]}={'null' if v is None else v}" for a, v in values.items())


def _refuse_too_many(plan: ParallelPlan, world_size: int | None) -> None:
    if world_size is not None and world_size > MAX_RANKS:
        raise ConfigError(f"{world_size:,} processes were started; a job has at most {MAX_RANKS:,}")
    if plan.world_size > MAX_RANKS:
        degrees = sorted(AXES, key=lambda axis: -getattr(plan, axis))
        raise RuleError(
            tuple(CONFIG_KEYS[axis] for axis in degrees if getattr(plan, axis) > 1),
            f"the degrees multiply to {plan.world_size:,} processes; a job has at most {MAX_RANKS:,}",
        )


def _batch_of(cfg: RunConfig, origins: dict[str, str]) -> tuple[BatchPlan, tuple[str, ...]]:
    """Return the batch sizes, and warnings.

    A value of ``accumulate_steps`` that contradicts the other sizes is ignored, with a warning, if it comes
    from a file.
    """
    sizes, steps, key = cfg.Global, cfg.Engine.accumulate_steps, "Engine.accumulate_steps"
    local, micro = sizes.local_batch_size or sizes.global_batch_size, sizes.micro_batch_size
    if sizes.rampup_batch_size is not None:
        _check_ramp(cfg)
    gives_way = None not in (steps, local, micro) and not is_argument(origins.get(key, "-o"))
    batch = resolve_batch(
        sizes.global_batch_size,
        sizes.local_batch_size,
        micro,
        None if gives_way else steps,
        data_size=cfg.plan.data_size,
        ramp=sizes.rampup_batch_size,
    )
    batch = replace(batch, lengths=_lengths(cfg))
    if not gives_way or batch.accumulate_steps == steps:
        return batch, ()
    return batch, (
        f"{key} = {steps} ({origins[key]}) is not used: it follows from local_batch_size "
        f"{batch.local_batch_size} / micro_batch_size {micro} = {batch.accumulate_steps}",
    )


def _check_ramp(cfg: RunConfig) -> None:
    key = "Global.rampup_batch_size"
    if cfg.Engine.run_mode == "epoch":
        raise RuleError((key, "Engine.run_mode"), "counts in steps, so it needs Engine.run_mode = step")
    if cfg.Model.virtual_pp_degree > 1:
        raise RuleError(
            (key, "Model.virtual_pp_degree"),
            "changes the number of micro batches, which the virtual-stage schedule depends on; use only one",
        )


def _lengths(cfg: RunConfig) -> Ramp | None:
    key, given, train = "Global.rampup_seq_len", cfg.Global.rampup_seq_len, cfg.Data.Train
    if given is None or train is None:
        return None
    ramp = Ramp(*given, full=train.dataset.max_seq_len)
    if not ramp.reaches_full:
        raise RuleError(
            (key, "Data.Train.dataset.max_seq_len"),
            f"cannot grow from {ramp.start} to {ramp.full} tokens by {ramp.increment} at a time",
        )
    if cfg.Model.task.classifies:
        raise RuleError((key, "Model.module"), "a classifier reads whole texts; leave it out")
    if not train.dataset.is_corpus:
        raise RuleError(
            (key, "Data.Train.dataset.name"),
            "the beginnings of records may have no token to learn; leave it out",
        )
    return ramp


def _with_derived(cfg: RunConfig, batch: BatchPlan) -> RunConfig:
    cfg = cfg.changed(
        "Global",
        global_batch_size=batch.global_batch_size,
        local_batch_size=batch.local_batch_size,
        micro_batch_size=batch.micro_batch_size,
    )
    cfg = cfg.changed(
        "Engine",
        accumulate_steps=batch.accumulate_steps,
        test_iters=cfg.Engine.test_iters or 10 * cfg.Engine.eval_iters,
    )
    if cfg.Model.task.classifies and glue_task(cfg) is not None:
        cfg = cfg.changed("Model", num_classes=num_outputs(cfg))
    if cfg.Engine.run_mode == "epoch":  # Only the data determine the length of an epoch.
        return cfg
    lr = cfg.Optimizer.lr
    decay_steps = lr.decay_steps or lr.in_units(cfg.Engine.max_steps, batch)
    return cfg.changed("Optimizer", lr=lr.model_copy(update={"decay_steps": decay_steps}))


def _with_lengths(cfg: RunConfig, origins: dict[str, str]) -> RunConfig:
    """Reduce ``max_seq_len`` of each dataset to the model's context length if it is greater and the user has
    not set it. Returns the resulting configuration."""
    longest = cfg.Model.max_position_embeddings
    for mode in MODES:
        section, key = getattr(cfg.Data, mode), f"Data.{mode}.dataset.max_seq_len"
        if section is not None and key not in origins and section.dataset.max_seq_len > longest:
            dataset = section.dataset.model_copy(update={"max_seq_len": longest})
            cfg = cfg.changed("Data", **{mode: section.model_copy(update={"dataset": dataset})})
    return cfg


def _violations(cfg: RunConfig, batch: BatchPlan) -> Iterator[RuleError]:
    yield from _noop_layers(cfg)
    plan, work = cfg.plan, workload_of(cfg, batch.accumulate_steps)
    # Check each sequence length by itself, so that the message names the length that does not fit.
    for broken in (*violations(plan, replace(work, seq_len=None)), *length_violations(cfg, plan)):
        hint = ""
        if plan.world_size > 1:
            near = nearest_plan(plan, plan.world_size, work)
            hint = f". The nearest legal plan for {plan.world_size}: {near}"
        yield RuleError(broken.keys, broken.rule + hint)
    yield from position_violations(cfg)
    yield from _overlaps(cfg)
    yield from fused_violations(cfg)
    yield from _schedules(cfg)
    yield from _tokens(cfg)
    yield from finetuning_violations(cfg)
    yield from compression_violations(cfg)
    yield from optimizer_violations(cfg)


def _noop_layers(cfg: RunConfig) -> Iterator[RuleError]:
    places, key = cfg.Distributed.noop_layers, "Distributed.noop_layers"
    if not places:
        return
    total, chunks = (
        cfg.Model.num_layers + len(places),
        cfg.Distributed.pp_degree * cfg.Model.virtual_pp_degree,
    )
    if max(places) >= total:
        yield RuleError(
            (key, "Model.num_layers"),
            f"num_layers {cfg.Model.num_layers} and {len(places)} empty places are counted from 0 to "
            f"{total - 1}",
        )
    if total % chunks:
        yield RuleError(
            (key, "Model.num_layers", "Distributed.pp_degree", "Model.virtual_pp_degree"),
            f"num_layers {cfg.Model.num_layers} and {len(places)} empty places do not divide into {chunks} "
            "equal parts",
        )


def _overlaps(cfg: RunConfig) -> Iterator[RuleError]:
    split = cfg.Model.sequence_parallel
    if cfg.Distributed.overlap_p2p_comm and cfg.Distributed.pp_degree == 1:
        keys = ("Distributed.overlap_p2p_comm", "Distributed.pp_degree")
        yield RuleError(keys, "needs pp_degree > 1: there are no messages to overlap")
    elif cfg.Distributed.overlap_p2p_comm and cfg.Model.virtual_pp_degree > 1:
        keys = ("Distributed.overlap_p2p_comm", "Model.virtual_pp_degree")
        yield RuleError(keys, "is built for whole stages: virtual_pp_degree must be 1")
    if cfg.Distributed.mp_async_allreduce and (split or cfg.Distributed.mp_degree == 1):
        why = "with sequence parallelism it is sp_async_reduce_scatter" if split else "it needs mp_degree > 1"
        yield RuleError(("Distributed.mp_async_allreduce",), f"{why}: there is no such sum to overlap")
    if cfg.Distributed.sp_async_reduce_scatter and not split:
        keys = ("Distributed.sp_async_reduce_scatter", "Model.sequence_parallel")
        yield RuleError(keys, "needs sequence parallelism: there is no such sum to overlap")


def _schedules(cfg: RunConfig) -> Iterator[RuleError]:
    lr = cfg.Optimizer.lr
    if lr.decay_steps is None:
        return
    decay = lr.decay_steps
    if lr.warmup_length > decay:
        yield RuleError(
            ("Optimizer.lr.warmup_steps", "Optimizer.lr.decay_steps", "Engine.max_steps"),
            f"a warm-up of {counted(lr.warmup_length, lr.unit, 'g')} is longer than the schedule of "
            f"{counted(decay, lr.unit)}; to train only the first steps of a longer one, set decay_steps to "
            "its length",
        )
    if (lr.wsd_decay_steps or 0) + lr.warmup_length > decay:
        yield RuleError(
            ("Optimizer.lr.wsd_decay_steps", "Optimizer.lr.warmup_steps", "Optimizer.lr.decay_steps"),
            f"warm-up ({lr.warmup_length:g}) and final decay ({lr.wsd_decay_steps}) are longer than the "
            f"schedule of {counted(decay, lr.unit)}",
        )


def _tokens(cfg: RunConfig) -> Iterator[RuleError]:
    for name in MODES:
        split = getattr(cfg.Data, name)
        if split is None:
            continue
        dataset, key = split.dataset, f"Data.{name}.dataset"
        if dataset.eod_id is not None and dataset.eod_id >= cfg.Model.vocab_size:
            yield RuleError(
                (f"{key}.eod_id", "Model.vocab_size"),
                f"token ids run from 0 to {cfg.Model.vocab_size - 1}",
            )
        needing = [
            k for k in ("eod_mask_loss", "reset_position_ids", "reset_attention_mask") if getattr(dataset, k)
        ]
        if needing and dataset.eod_id is None and cfg.Data.tokenizer is None:
            yield RuleError(
                (f"{key}.{needing[0]}",),
                f"needs to know the end of a document; give {key}.eod_id or Data.tokenizer",
            )
