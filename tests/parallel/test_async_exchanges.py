"""Tensor-parallel sums and pipeline messages that overlap computation give the same bits."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ppfleetx.config.errors import ConfigError
from ppfleetx.config.loader import load_config
from ppfleetx.config.parallel_plan import ParallelPlan as Plan
from tests.helpers.ranks import Pools
from tests.parity.training import CONFIG, GLOBAL_BATCH

REDUCES = {"Distributed.mp_async_allreduce": True}
SCATTERS = {"Distributed.sp_async_reduce_scatter": True}
SENDS = {"Distributed.overlap_p2p_comm": True}
GATHERS = {**SCATTERS, "Distributed.recompute_allgather": True}
ADAPTERS = {"Model.lora.rank": 2}
CHUNKS = {"Model.loss_chunks": 3}
RECOMPUTES = {"Model.use_recompute": True, "Model.hidden_dropout_prob": 0.1}
VIRTUAL = ["Distributed.pp_degree=2", "Model.virtual_pp_degree=2", "Model.num_layers=4"]
# With biases the product must not be rounded before they are added.
HALVES = [
    {
        "Engine.mix_precision.enable": True,
        "Engine.mix_precision.dtype": dtype,
        "Engine.mix_precision.level": level,
        "Engine.mix_precision.scale_loss": 2.0**10,
    }
    for dtype, level in (("bfloat16", "O1"), ("bfloat16", "O2"), ("float16", "O1"))
]
SPLIT = Plan(mp=2, sequence_parallel=True)


def test_what_is_sent_stays_until_it_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    import paddle
    from paddle.base import core

    from ppfleetx.parallel.pipeline_schedules import ListedPipeline

    def held() -> int:
        return core.host_memory_stat_current_value("Allocated", 0)

    waited, pipeline = [], ListedPipeline.__new__(ListedPipeline)
    object.__setattr__(pipeline, "_sent", {})
    task = SimpleNamespace(wait=lambda: waited.append(held()))
    monkeypatch.setattr(ListedPipeline, "_start", lambda self, **_: (None, None, [task]))
    before, output = held(), paddle.ones([1024])
    pipeline._send("tensor_send_next", (output,))
    output._clear_dataptr()
    assert held() == before + 4096
    pipeline._complete("tensor_send_next")
    assert waited == [before + 4096] and held() == before


@pytest.mark.slow_after(3)
@pytest.mark.parametrize(
    ("plan", "model", "extra", "keys"),
    [
        (Plan(mp=2), "gpt", {}, [REDUCES]),
        (Plan(mp=2), "llama", ADAPTERS, [REDUCES]),
        (SPLIT, "gpt", RECOMPUTES, [SCATTERS, GATHERS]),
        (Plan(mp=2, pp=2, sequence_parallel=True, pp_schedule="zb_h1"), "gpt", {}, [SCATTERS, GATHERS]),
        (Plan(pp=2, mp=2, pp_schedule="zb_h1"), "llama", {}, [{**SENDS, **REDUCES}]),
        (Plan(pp=4), "gpt", {"Model.num_layers": 4, **RECOMPUTES}, [SENDS]),
        (Plan(mp=2, sharding=2, sharding_stage=3), "llama", {}, [REDUCES]),
        *((Plan(mp=2), "gpt", half, [REDUCES]) for half in HALVES),
        (SPLIT, "gpt", HALVES[0], [SCATTERS, GATHERS]),
    ],
    ids=str,
)
def test_no_bit_changes(pools: Pools, plan: Plan, model: str, extra: dict, keys: list[dict]) -> None:
    ranks = pools.run(
        plan,
        "tests.parallel.two_schedules:with_keys",
        timeout=180.0,
        model=model,
        extra={"Model.num_layers": 2, **extra},
        keys=[{}, *keys],
    )
    for waits, *overlaps in ranks:
        assert overlaps == [waits] * len(keys)


O1, O2 = HALVES[:2]
ZERO_BUBBLE = Plan(pp=2, pp_schedule="zb_h1")


@pytest.mark.slow_after(6)
@pytest.mark.parametrize(
    ("plan", "extra", "taken", "more"),
    [
        (Plan(mp=2), O1, ["weight_cast"], []),
        (Plan(mp=2), O2, ["linear_grad_add"], []),
        (Plan(mp=2), {**O2, "Engine.mix_precision.main_grad_fp32": False}, [], []),
        (Plan(mp=2), {**O1, "Engine.mix_precision.custom_black_list": "[matmul]"}, [], []),
        (Plan(sharding=2, sharding_stage=3), O1, [], []),
        (Plan(sharding=2, sharding_stage=3), O2, ["linear_grad_add"], []),
        (Plan(mp=2), {**O1, **REDUCES}, ["weight_cast"], ["overlapped"]),
        (Plan(mp=2), {**O2, **REDUCES}, ["linear_grad_add"], ["overlapped"]),
        (Plan(mp=2), {**O2, **REDUCES, **CHUNKS}, ["linear_grad_add"], ["overlapped"]),
        (SPLIT, {**O1, **SCATTERS}, ["weight_cast"], ["overlapped"]),
        (SPLIT, {**O2, **GATHERS, **RECOMPUTES}, ["linear_grad_add"], ["overlapped"]),
        (Plan(mp=2), {**O1, "Compress.Quantization.enable": True}, [], []),
        (Plan(pp=2), O1, ["weight_cast"], []),
        (ZERO_BUBBLE, O1, ["weight_cast"], ["deferred"]),
        (ZERO_BUBBLE, O2, ["linear_grad_add"], ["deferred"]),
        (ZERO_BUBBLE, {**O2, **CHUNKS}, ["linear_grad_add"], ["deferred"]),
        (ZERO_BUBBLE, {**O1, **CHUNKS}, ["weight_cast"], ["deferred"]),
        (ZERO_BUBBLE, {**O2, "Compress.Quantization.enable": True}, [], ["deferred"]),
    ],
    ids=str,
)
def test_options_of_a_product_take_effect_together(
    pools: Pools, plan: Plan, extra: dict, taken: list, more: list
) -> None:
    """They take effect in every product with a trainable weight, including the head, and the log lists the
    fused operators."""
    for place, rank in enumerate(
        pools.run(
            plan,
            "tests.parallel.two_schedules:uses",
            timeout=180.0,
            extra={"Model.num_layers": 2, **extra},
        )
    ):
        used = rank["used"]
        assert rank["taken"] == rank["said"] == taken
        assert {*used} - {"casts"} == {*taken, *more}
        # Four linears in each layer held here, half of which are column-parallel, and perhaps the head.
        ends_here, passes = plan.pp == 1 or place == 1, GLOBAL_BATCH // plan.data_size // 4
        products = passes * (4 * 2 // plan.pp + ends_here)
        if taken == ["linear_grad_add"]:
            assert used["linear_grad_add"] == products
        chunked = ends_here and "Model.loss_chunks" in extra
        if "deferred" in more:
            assert used["deferred"] == products - passes * chunked
        if "overlapped" in more:
            assert used["overlapped"] == passes * (2 * 2 + (not chunked))


@pytest.mark.parametrize(
    ("name", "overrides", "keys"),
    [
        ("weight_cast", ["Engine.mix_precision.level=O2"], ["Engine.mix_precision.level"]),
        ("linear_grad_add", ["Engine.mix_precision.level=O1"], ["Engine.mix_precision.level"]),
        (
            "linear_grad_add",
            ["Engine.mix_precision.main_grad_fp32=False"],
            ["Engine.mix_precision.main_grad_fp32"],
        ),
        (
            "weight_cast",
            [
                "Engine.mix_precision.level=O1",
                "Distributed.sharding.sharding_degree=2",
                "Distributed.sharding.sharding_stage=3",
            ],
            ["Distributed.sharding.sharding_stage"],
        ),
        ("linear_grad_add", ["Compress.Quantization.enable=True"], ["Compress.Quantization.enable"]),
    ],
    ids=str,
)
def test_a_fused_product_that_would_not_be_used_is_refused(name: str, overrides: list, keys: list) -> None:
    listed = [f"Model.fused_ops=[adamw, {name}]", "Engine.mix_precision.enable=True", *overrides]
    with pytest.raises(ConfigError, match=f"{name} would not be used") as refused:
        load_config(CONFIG, listed)
    for key in ("Model.fused_ops", *keys):
        assert key in str(refused.value)
    load_config(CONFIG, ["Model.fused_ops=[adamw]", *listed[1:]])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["Distributed.mp_async_allreduce=True"], r"mp_async_allreduce.*mp_degree > 1"),
        (
            [
                "Distributed.mp_async_allreduce=True",
                "Distributed.mp_degree=2",
                "Model.sequence_parallel=True",
            ],
            r"mp_async_allreduce.*sp_async_reduce_scatter",
        ),
        (["Distributed.sp_async_reduce_scatter=True"], r"sp_async_reduce_scatter.*sequence parallelism"),
        (["Distributed.overlap_p2p_comm=True"], r"overlap_p2p_comm.*pp_degree > 1"),
        (
            ["Distributed.overlap_p2p_comm=True", *VIRTUAL],
            r"overlap_p2p_comm.*virtual_pp_degree must be 1",
        ),
        (["Distributed.recompute_allgather=True"], r"recompute_allgather.*sp_async_reduce_scatter too"),
    ],
)
def test_what_has_no_sum_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(CONFIG, overrides)
