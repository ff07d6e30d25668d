"""Floating-point operations of a step in the conventions that papers use, and shares of a card's peak."""

from __future__ import annotations

from dataclasses import dataclass

from ppfleetx.models.gpt.spec import flops_per_step, matrix_size
from ppfleetx.planner.cards import Card
from ppfleetx.planner.case import Case


@dataclass(frozen=True)
class StepFlops:
    """Floating-point operations of one optimizer step of the whole job; a multiply-add counts as two.

    Attributes:
        causal: model FLOPs with the causal half of attention (Megatron-LM since 2024; the log's convention).
        full: model FLOPs with all pairs of positions: 72 B s l h^2 (1 + s / 6h + V / 12lh) for a plain GPT
            (Narayanan et al. 2021, Korthikanti et al. 2022). MFU in this package is made from it.
        hardware: ``full`` and what is recomputed: 96 B s l h^2 (1 + s / 6h + V / 16lh) with full recompute.
    """

    causal: int
    full: int
    hardware: int


def step_flops(case: Case) -> StepFlops:
    """Count the operations of a step of ``case``."""
    batch, tokens = case.global_batch, case.global_batch * case.seq_len
    causal = flops_per_step(case.model, batch, case.seq_len)
    full = hardware = causal
    for block, recompute in case.layers:
        core = 2 * tokens * case.seq_len * block.attention.score_width  # of a forward pass, all pairs
        again = {
            "none": 0,
            "core_attn": core,
            "full_attn": core + 2 * tokens * matrix_size(block.attention),
            "full": core + 2 * tokens * matrix_size(block),
        }
        full += core * 3 // 2
        hardware += core * 3 // 2 + again[recompute]
    return StepFlops(causal, full, hardware)


def tflops_per_device(flops: float, seconds: float, case: Case) -> float:
    """TFLOP/s of each device."""
    return flops / seconds / case.plan.world_size / 1e12


def model_flops_utilization(case: Case, seconds: float, card: Card) -> float:
    """MFU (Chowdhery et al. 2022, §4.1): full-attention model FLOPs over the peak, between 0 and 1."""
    return tflops_per_device(step_flops(case).full, seconds, case) * 1e12 / card.peak(case.precision.compute)
