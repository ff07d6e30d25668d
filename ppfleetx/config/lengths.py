"""The sequence lengths of a run: what the position table and the plan have to allow."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ppfleetx.config.fields import RuleError
from ppfleetx.config.plan import CONFIG_KEYS, ParallelPlan, Violation, Workload, violations
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.config.sections.root import RunConfig


def used_lengths(cfg: RunConfig) -> dict[str, int]:
    """Key -> tokens per sequence, for every set of data that a program reads under this configuration.

    ``Data.Test`` is read for a GLUE task alone, and an offline evaluation reads its own file alone.
    """
    if cfg.Model.task.offline_evaluation:
        return {"Offline_Eval.max_seq_len": cfg.Offline_Eval.max_seq_len}
    splits = {"Train": cfg.Data.Train, "Eval": cfg.Data.Eval}
    if cfg.Model.task.classifies:
        splits["Test"] = cfg.Data.Test
    return {
        f"Data.{name}.dataset.max_seq_len": split.dataset.max_seq_len
        for name, split in splits.items()
        if split is not None
    }


def workload_of(cfg: RunConfig, accumulate_steps: int | None = None) -> Workload:
    """The numbers of model and data that a plan has to divide.

    Of the lengths it is their greatest common divisor: what divides that divides each of them.
    """
    model = cfg.Model
    return Workload(
        num_layers=model.num_layers,
        num_heads=model.num_attention_heads,
        num_groups=model.kv_heads,
        ffn_size=model.ffn_size,
        padded_vocab=model.padded_vocab_size,
        seq_len=math.gcd(*used_lengths(cfg).values()) or None,
        accumulate_steps=accumulate_steps,
        **expert_sizes(model),
    )


def expert_sizes(model: ModelConfig) -> dict[str, int | None]:
    """What a plan has to divide of a mixture of experts."""
    if model.moe is None:
        return {"num_experts": 0}
    return {"num_experts": model.moe.num_experts, "expert_size": model.moe.expert_ffn_size or model.ffn_size}


def length_violations(cfg: RunConfig, plan: ParallelPlan) -> Iterator[Violation]:
    """The rules on sequence lengths that ``plan`` breaks, for every length that the run uses."""
    written_as = CONFIG_KEYS["seq_len"]
    for key, length in used_lengths(cfg).items():
        for broken in violations(plan, Workload(seq_len=length)):
            if written_as in broken.keys:
                keys = tuple(key if name == written_as else name for name in broken.keys)
                yield Violation(keys, broken.sentence)


def position_violations(cfg: RunConfig) -> Iterator[RuleError]:
    """Sequences, read or generated, that are longer than the model's positions."""
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
