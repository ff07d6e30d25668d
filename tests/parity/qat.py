"""Quantization-aware training under plans of every kind, in float64: what is compared, and with what.

A sum in another order differs in the last digit. Rounded to a grid, that is nothing at all, or, rarely, a
whole step of the grid for one element. In float64 the second does not happen, so that what remains is what a
plan does to the definition of scales, bounds and gradients.
"""

from ppfleetx.config.parallel_plan import ParallelPlan as Plan

_KEY = "Compress.Quantization."
_MOVING = {f"{_KEY}enable": True}
FORMS = {
    "per tensor, moving average": _MOVING,
    "per channel, each token": {
        **_MOVING,
        f"{_KEY}weight_quantize_type": "channel_wise_abs_max",
        f"{_KEY}activation_quantize_type": "abs_max",
    },
    "PACT": {
        **_MOVING,
        f"{_KEY}weight_quantize_type": "channel_wise_abs_max",
        f"{_KEY}weight_preprocess_type": "PACT",
        f"{_KEY}activation_preprocess_type": "PACT",
        f"{_KEY}weight_bits": 4,
        "Model.use_recompute": True,
    },
    "frozen embedding, 5 bits": {
        **_MOVING,
        f"{_KEY}weight_bits": 5,
        f"{_KEY}activation_bits": 6,
        f"{_KEY}freeze_embedding": True,
        f"{_KEY}skip_tensor_map": "{block_0: [linear2]}",
        "Model.use_recompute": True,
    },
}

PLANS = [
    Plan(dp=2), Plan(mp=2), Plan(pp=2), Plan(sep=2), Plan(sharding=2), Plan(mp=2, sequence_parallel=True),
    Plan(sharding=2, sharding_stage=2), Plan(sharding=2, sharding_stage=3), Plan(pp=2, virtual_pp_degree=2),
    Plan(mp=4), Plan(dp=2, mp=2), Plan(mp=4, sequence_parallel=True), Plan(dp=2, pp=2), Plan(dp=2, sep=2),
    Plan(mp=2, pp=2, sequence_parallel=True), Plan(mp=2, sep=2), Plan(mp=2, sharding=2, sharding_stage=2),
    Plan(mp=2, sharding=2, sharding_stage=3, sequence_parallel=True),
    Plan(pp=2, sharding=2, sharding_stage=3), Plan(pp=4, virtual_pp_degree=2), Plan(mp=8),
    Plan(mp=8, sequence_parallel=True), Plan(dp=2, mp=2, pp=2), Plan(dp=2, mp=2, sharding=2),
    Plan(mp=2, pp=2, sharding=2, sharding_stage=3, sequence_parallel=True), Plan(mp=2, pp=2, sep=2),
]  # fmt: skip


def rows() -> list[tuple[Plan, str, str]]:
    """(plan, form, model): every plan with two forms and models, which take turns."""
    forms = list(FORMS)
    return [
        (plan, forms[(number + turn) % len(forms)], ("gpt", "llama")[(number // 2 + turn) % 2])
        for turn in (0, 1)
        for number, plan in enumerate(PLANS)
    ]


def options(form: str) -> dict[str, object]:
    """What :meth:`tests.parity.comparison.Comparison.run` is given beside plan, model and optimizer."""
    return {"extra": FORMS[form], "dtype": "float64"}
