"""Every legal plan of the visible cards against one card."""

import functools
from dataclasses import replace

import pytest

from ppfleetx.config.parallel_plan import ParallelPlan as Plan
from ppfleetx.config.parallel_plan import enumerate_plans
from tests.device import reference
from tests.device.place import deterministic, place
from tests.helpers.ranks import Pools
from tests.parity import experts
from tests.parity.comparison import Comparison, apart, micro_batch_size_of
from tests.parity.every_plan import workload

pytestmark = pytest.mark.device

MODELS = ("gpt", "llama", "mixed")


def _plans():
    """(plan, model) of 2 and more cards. Of the reference device's four, which has a CPU's kernels for all
    models, the models take turns."""
    for size in place().sizes(start=2):
        for number, plan in enumerate(enumerate_plans(size, workload("gpt"))):
            in_turn = place().is_reference and size > 2
            for model in MODELS[number % 3 : number % 3 + 1] if in_turn else MODELS:
                if model != "mixed" or size <= 4:
                    yield plan, model


def _expert_plans():
    """Those that divide experts: all of 2 cards, a choice of those of 4."""
    for size in (size for size in place().sizes(start=2) if size <= 4):
        plans = experts.plans(size, workload("moe"))[:: 1 if size == 2 else 9]
        yield from ((plan, ("moe", "moe_bias")[number % 2]) for number, plan in enumerate(plans))


def _family_plans():
    """The networks of other families under one plan of each kind for two cards."""
    kinds = (Plan(mp=2, sequence_parallel=True), Plan(sep=2), Plan(pp=2), Plan(sharding=2, sharding_stage=3))
    if 2 in place().sizes(start=2):
        yield from ((plan, model) for model in ("gemma", "alibi", "olmo", "stablelm") for plan in kinds)


PLANS = [
    pytest.param(plan, model, id=f"{model}: {plan}")
    for plan, model in (*_plans(), *_expert_plans(), *_family_plans())
] or [pytest.param(Plan(dp=2), "gpt", id="two cards")]
OPTIONS = {
    "": {},
    "no overlap": {
        "Distributed.sharding.reduce_overlap": False,
        "Distributed.sharding.broadcast_overlap": False,
    },
    "messages overlap": {"Distributed.overlap_p2p_comm": True},
    "sums overlap": {"Distributed.mp_async_allreduce": True},
    "scattered sums overlap": {
        "Distributed.sp_async_reduce_scatter": True,
        "Distributed.recompute_allgather": True,
    },
    **{
        f"recompute {granularity}": {
            "Model.use_recompute": True,
            "Model.recompute_granularity": granularity,
        }
        for granularity in ("full", "full_attn", "core_attn")
    },
}
OPTIONS["as 175B"] = {**OPTIONS["recompute core_attn"], "Model.fused_linear": True}
SHARDED = [Plan(sharding=2, sharding_stage=stage) for stage in (1, 2, 3)]
SEQUENCES = Plan(mp=2, sequence_parallel=True)
PASSES = [Plan(pp=2, pp_schedule="zb_h1"), Plan(pp=4, pp_schedule="zb_h1"), Plan(pp=2), Plan(pp=4)]
_VARIED = [
    *((plan, "no overlap") for plan in (Plan(dp=2), *SHARDED)),
    *((plan, "messages overlap") for plan in (*PASSES, Plan(mp=2, pp=2), Plan(pp=2, sharding=2))),
    *((plan, "") for plan in (*PASSES[:2], Plan(pp=2, mp=2, pp_schedule="zb_h1"))),
    *((plan, "sums overlap") for plan in (Plan(mp=2), Plan(mp=2, pp=2), Plan(mp=4))),
    *((plan, "scattered sums overlap") for plan in (SEQUENCES, replace(SEQUENCES, pp=2))),
    *((plan, "recompute full") for plan in (SEQUENCES, Plan(pp=2), SHARDED[2])),
    *((plan, "recompute core_attn") for plan in (Plan(pp=2, mp=2), Plan(sep=2), Plan(dp=2))),
    (Plan(mp=2), "recompute full_attn"),
]
_LIMITED = [
    *((plan, "messages overlap") for plan in PASSES),
    *((plan, "") for plan in (*PASSES[:2], Plan(pp=4, virtual_pp_degree=2), Plan(pp=2, virtual_pp_degree=2))),
    *((plan, "") for plan in (Plan(dp=2), SEQUENCES, Plan(sep=2), *SHARDED, Plan(mp=2, pp=2))),
]
"""Plans whose messages or sums are made of what a library like Ascend's has not."""
_ONE_OF_EACH = [Plan(dp=2), Plan(mp=2), SEQUENCES, Plan(pp=2), Plan(sep=2), *SHARDED[1:], Plan(mp=2, pp=2)]


def _fits(plan):
    return plan.world_size <= max(place().sizes())


def _rows(plans):
    return [pytest.param(plan, name, id=f"{plan} {name}") for plan, name in plans if _fits(plan)]


VARIANTS, LIMITED = _rows(_VARIED), _rows(_LIMITED)
DROPPING = _rows((plan, "") for plan in dict.fromkeys(plan for plan, _ in _plans()))
DROPOUT = {"Model.hidden_dropout_prob": 0.2, "Model.attention_probs_dropout_prob": 0.2}
HALF_PLANS = [
    *(
        pytest.param(*row.values, "bfloat16", "O2", "", id=row.id)
        for row in PLANS
        if row.values[1] != "mixed"
    ),
    *(
        pytest.param(plan, "gpt", dtype, level, "", id=f"{dtype} {level}: {plan}")
        for dtype, level in (("bfloat16", "O1"), ("float16", "O1"), ("float16", "O2"))
        for plan in filter(_fits, _ONE_OF_EACH)
    ),
    *(
        pytest.param(plan, "gpt", "float16", "O2", "as 175B", id=f"as 175B: {plan}")
        for plan in filter(_fits, [replace(SEQUENCES, pp=2)])
    ),
]
# Relative. A card adds in another order than itself for other shapes; a wrong plan is wrong by 1e-3 and more.
TOLERANCE = 5e-5
HALF_TOLERANCES = {"bfloat16": 4e-3, "float16": 5e-4}
"""Of losses alone: the rounding step of the type. Plans round at different places."""


@pytest.fixture(scope="module")
def on_cpus(tmp_path_factory):
    with Pools() as pools:
        yield Comparison(pools, tmp_path_factory.mktemp("cpus"))


@pytest.fixture(scope="module")
def limited(here, device, tmp_path_factory):
    """Plans on a reference device that can as little as Ascend's library."""
    if not here.is_reference:
        pytest.skip("a real card has the limits that it has")
    with Pools(device=device, **reference.strict(ascend=1, rendezvous=1, timeout_s=60)) as pools:
        yield Comparison(pools, tmp_path_factory.mktemp("limited"), short=True)


@pytest.fixture
def check(comparison, need_cards, device, record_property):
    """``check(plan, model, optimizer, **options)``: assert that it begins and trains as one card does."""

    def equal(plan, model="gpt", optimizer="sgd", *, of=comparison, **options):
        need_cards(plan.world_size)
        extra = {"Global.device": device, **options.pop("extra", {})}
        found = of.run(plan, model, optimizer, extra=extra, **options)
        record_property(optimizer, str(found))
        assert found.first == 0, "initial weights"
        assert found.worst <= TOLERANCE, found

    return equal


@pytest.mark.slow_after(4)
@pytest.mark.parametrize(("plan", "model"), PLANS)
def test_float32(check, plan, model):
    for optimizer in ("adamw", "sgd"):
        check(plan, model, optimizer)


@pytest.mark.parametrize(("plan", "name"), VARIANTS)
def test_variants_in_float32(check, plan, name):
    """What a plan does at other times, or again, is the same."""
    check(plan, of_plan=OPTIONS[name])


@pytest.mark.parametrize(("plan", "name"), VARIANTS + DROPPING)
def test_dropout(comparison, here, on_cpus, device, record_property, plan, name):
    """The reference device draws what a CPU draws. So a plan with dropout, in whose replicas masks differ, is
    compared with the same plan on the CPU."""
    if not here.is_reference:
        pytest.skip("a real card draws other numbers than a CPU")
    extra = {**DROPOUT, **OPTIONS[name], "Model.num_layers": 8 if plan.num_chunks > 2 else 4}
    there = on_cpus.run_plan(plan, "gpt", "sgd", extra=extra, steps=2)
    found = comparison.run_plan(plan, "gpt", "sgd", extra={**extra, "Global.device": device}, steps=2)
    numbers = [(one["loss"] + one["grad_norm"]) for one in (found[0], there[0])]
    worst = apart(*numbers)
    record_property("loss and gradient norm", worst)
    assert worst <= TOLERANCE


@pytest.mark.parametrize(("plan", "name"), LIMITED)
def test_libraries_with_limits(limited, check, plan, name):
    """Ascend's reductions, sends that wait for their receives, and no all-to-all."""
    check(plan, of=limited, of_plan=OPTIONS[name])


@pytest.mark.parametrize("plan", [Plan(dp=2, ep=2), Plan(mp=2)], ids=str)
def test_experts_with_such_libraries(limited, check, plan):
    check(plan, "moe", of=limited)


@pytest.mark.parametrize("limits", [{}, {"ascend": 1}], ids=["", "as Ascend's library"])
@pytest.mark.parametrize("plan", [Plan(dp=4, ep=4), Plan(sharding=4, sharding_stage=2, ep=4)], ids=str)
def test_experts_on_two_levels(here, device, need_cards, check, tmp_path_factory, plan, limits):
    """Two of four cards pretend to be in another machine."""
    need_cards(4)
    if limits and not here.is_reference:
        pytest.skip("a real card has the limits that it has")
    environment = reference.strict(**limits, timeout_s=60) if here.is_reference else here.environment
    train = "tests.device.cases.training:train_on_two_levels"
    with Pools(device=device, PADDLE_LOCAL_SIZE="2", **environment) as pools:
        nodes = Comparison(pools, tmp_path_factory.mktemp("levels"), short=True, train=train)
        check(plan, "moe", of=nodes)


@pytest.fixture(scope="module")
def train_in_16_bits(comparison, device):
    """``train_in_16_bits(plan, model, dtype, level, name)``: results by rank, of each run once."""

    @functools.cache
    def train(plan, model, dtype, level, name):
        return comparison.pools.run(
            plan,
            "tests.device.cases.training:train_in_16_bits",
            timeout=300.0,
            model=model,
            micro_batch_size=micro_batch_size_of(plan),
            mix_precision={"dtype": dtype, "level": level},
            steps=3,
            extra={"Global.device": device, "Model.head_dim": 8, **OPTIONS[name]},  # flash attention serves 8
        )

    return train


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "model", "dtype", "level", "name"), HALF_PLANS)
def test_16_bits(train_in_16_bits, need_cards, need_type, record_property, plan, model, dtype, level, name):
    need_cards(plan.world_size)
    need_type(dtype)
    expected, results = (train_in_16_bits(each, model, dtype, level, name) for each in (Plan(), plan))
    for result in results:
        assert result["misrounded"] == result["inexact_masters"] == [] and result["error"] == ""
        assert result["loss"] == results[0]["loss"], "ranks tell different losses"
    found = apart(results[0]["loss"], expected[0]["loss"])
    record_property("loss", found)
    assert found <= HALF_TOLERANCES[dtype]


@pytest.mark.parametrize(
    "plan", [Plan(), Plan(mp=2), Plan(pp=2), Plan(sharding=2, sharding_stage=3)], ids=str
)
def test_adapters(comparison, check, device, plan):
    """Beside frozen weights; one card as the CPU."""
    keys = {"Model.lora.rank": 4, "Model.num_layers": 4}
    if plan.world_size > 1:
        check(plan, optimizer="adamw", extra=keys)
        return
    card, cpu = (
        comparison.reference("gpt", "adamw", 8, steps=3, extra={**keys, "Global.device": where})[0]
        for where in (device, "cpu")
    )
    for key in ("loss", "grad_norm"):
        assert card[key] == pytest.approx(cpu[key], rel=TOLERANCE)


@pytest.mark.parametrize("stage", [2, 3])
def test_offload_repeats_and_stays_close(comparison, need_cards, device, record_property, stage):
    """States in host memory: the CPU's kernel updates. Twice the same bits; the card's kernel may round
    otherwise."""
    need_cards(2)
    plans = [Plan(sharding=2, sharding_stage=stage, sharding_offload=on) for on in (False, True, True)]
    plain, one, other = (
        comparison.pools.run(
            plan,
            "tests.device.cases.training:train_in_16_bits",
            timeout=300.0,
            micro_batch_size=4,
            mix_precision={"enable": False},
            steps=4,
            extra={"Global.device": device, **deterministic(device)},
        )
        for plan in plans
    )
    assert one == other, "the same run twice"
    found = apart(one[0]["loss"], plain[0]["loss"])
    record_property("loss", found)
    assert found <= TOLERANCE
