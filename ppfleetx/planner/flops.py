"""Floating-point operations of a step in the conventions that papers use, and shares of a card's peak."""

from __future__ import annotations

from dataclasses import dataclass

from ppfleetx.models.gpt.shape import flops_per_step
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
    model, batch, length = case.model, case.global_batch, case.seq_len
    causal = flops_per_step(model, batch, length)
    width = model.num_attention_heads * model.head_size
    half_scores = 6 * batch * length**2 * width  # of one layer, forward and backward
    full = causal + half_scores * model.num_layers
    head = 6 * batch * length * model.hidden_size * model.padded_vocab_size
    layer_forward = (full - head) // (3 * model.num_layers)
    core_forward = 2 * half_scores // 3
    kv_width = model.kv_heads * model.head_size
    projections = 2 * batch * length * model.hidden_size * (2 * width + 2 * kv_width)
    again = {
        "none": 0,
        "core_attn": core_forward,
        "full_attn": core_forward + projections,
        "full": layer_forward,
    }
    return StepFlops(causal, full, full + sum(again[kind] for kind in case.recomputed))


def tflops_per_device(flops: float, seconds: float, case: Case) -> float:
    """TFLOP/s of each device."""
    return flops / seconds / case.plan.world_size / 1e12


def model_flops_utilization(case: Case, seconds: float, card: Card) -> float:
    """MFU (Chowdhery et al. 2022, §4.1): full-attention model FLOPs over the peak, between 0 and 1."""
    return tflops_per_device(step_flops(case).full, seconds, case) * 1e12 / card.peak(case.precision.compute)
