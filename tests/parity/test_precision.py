"""16-bit training under plans is close to one card in the same type; an overflow is seen by all ranks.

The CPU has no 16-bit kernels: tests/helpers/low_precision.py emulates them under the program's own code.
"""

import json
import math

import pytest

from ppfleetx.config.parallel_plan import ParallelPlan as Plan
from tests.parity.comparison import apart, micro_batch_size_of

PLANS = [Plan(dp=2), Plan(mp=2), Plan(mp=2, sequence_parallel=True), Plan(pp=2), Plan(sharding=2)]
SMALL = {"Model.num_layers": 2}
# Largest relative difference of a loss from one card's in the same type: roundings differ where sums are
# cut differently. float16 keeps three bits more than bfloat16.
TOLERANCE = {"bfloat16": 6e-4, "float16": 7.5e-5}
# The first steps overflow: 2^24 times the gradient of a logit is more than float16 holds.
FROM_ABOVE = {"dtype": "float16", "scale_loss": 2.0**24, "hysteresis": 1}


@pytest.fixture(scope="module")
def run(comparison):
    """Results of a run by rank."""
    return lambda plan, mix_precision, micro_batch_size=0, **more: comparison.pools.run(
        plan,
        "tests.parity.low_precision:train",
        micro_batch_size=micro_batch_size or micro_batch_size_of(plan),
        mix_precision=mix_precision,
        **{**more, "extra": {**SMALL, **more.get("extra", {})}},
    )


@pytest.fixture(scope="module")
def one_card(run):
    kept = {}

    def result(mix_precision, **more):
        key = json.dumps([mix_precision, more])
        if key not in kept:
            kept[key] = run(Plan(), mix_precision, **more)[0]
        return kept[key]

    return result


def difference(results, expected):
    for result in results:
        assert result["misrounded"] == [] and result["error"] == ""
        for key in ("loss", "grad_norm", "scale", "skipped"):
            assert result[key] == results[0][key], f"{key} differs between ranks"
    return apart(results[0]["loss"], expected["loss"])


@pytest.mark.slow_after(3)
@pytest.mark.parametrize(
    ("plan", "dtype", "level"),
    [
        *((plan, ("bfloat16", "float16")[number % 2], "O2") for number, plan in enumerate(PLANS)),
        *((plan, "bfloat16", "O1") for plan in PLANS[2:4]),
    ],
    ids=str,
)
def test_close_to_one_card(run, one_card, plan, dtype, level):
    options = {"dtype": dtype, "level": level}
    expected, results = one_card(options, steps=3), run(plan, options, steps=3)
    assert difference(results, expected) <= TOLERANCE[dtype]
    for result in results:
        assert result["inexact_masters"] == []
        assert result["types"] == [dtype if level == "O2" else "float32"]
        assert ("master_weight" in result["states"]) == (level == "O2")
        assert set(result["scale"]) == ({32768.0} if dtype == "float16" else {None})


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_scales_from_above(run, one_card, plan):
    """Every rank skips the same steps, and they are the ones that one card skips with micro batches as
    large: within one of them a weight's gradient is summed in float16."""
    options = {"micro_batch_size": 4, "steps": 8}
    expected, results = one_card(FROM_ABOVE, **options), run(plan, FROM_ABOVE, **options)
    assert expected["skipped"][0] and not expected["skipped"][-1]
    halvings = [2.0 ** (24 - sum(expected["skipped"][:step])) for step in range(8)]
    assert expected["scale"] == halvings
    for result in results:
        assert (result["scale"], result["skipped"]) == (expected["scale"], expected["skipped"])
        changed = [a != b for a, b in zip(result["digest"], result["digest"][1:], strict=False)]
        assert changed == [not skipped for skipped in result["skipped"]], "a skipped step changed a state"


@pytest.mark.slow_after(3)
@pytest.mark.parametrize(
    ("plan", "name"),
    [
        (Plan(dp=2), "decoder.layers.0.attention.qkv.weight"),
        (Plan(mp=2), "decoder.layers.1.mlp.fc1.weight"),
        (Plan(mp=2), "decoder.layers.1.mlp_norm.weight"),  # whole on both: one of them counts it
        (Plan(mp=2, sequence_parallel=True), "decoder.final_norm.bias"),
        (Plan(pp=2), "decoder.final_norm.weight"),
        (Plan(pp=2), "embedding.word_embeddings.weight"),  # tied: copies on both
        (Plan(sharding=2), "decoder.layers.1.mlp.fc2.weight"),
        (Plan(sharding=2, sharding_stage=2), "decoder.layers.1.mlp.fc2.weight"),
        (Plan(sharding=2, sharding_stage=2, sharding_offload=True), "decoder.layers.1.mlp.fc2.weight"),
    ],
    ids=str,
)
def test_an_overflow_on_one_rank_is_seen_by_all(run, plan, name):
    options = {"dtype": "float16", "scale_loss": 1024.0, "hysteresis": 2, "incr_every_n_steps": 2}
    results = run(plan, options, steps=6, spoilt={"1": name, "2": name})
    for result in results:
        assert result["skipped"] == [False, True, True, False, False, False]
        # The second overflow halves; two quiet steps double.
        assert result["scale"] == [1024.0, 1024.0, 1024.0, 512.0, 512.0, 1024.0]
        digests = result["digest"]
        assert digests[1] == digests[2] == digests[3]
        assert len(set(digests)) == len(digests) - 2
        assert all(math.isfinite(loss) for loss in result["loss"])


@pytest.mark.parametrize("plan", [Plan(mp=2), Plan(pp=2)], ids=str)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"scale_loss": 1.0}, "at the smallest loss scale, 1"),
        ({"scale_loss": 64.0, "use_dynamic_loss_scaling": False}, "at the constant loss scale, 64"),
    ],
)
def test_where_no_smaller_scale_is_left_the_run_ends(run, plan, options, words):
    spoilt = {"1": "decoder.layers.1.mlp_norm.weight"}
    results = run(plan, {"dtype": "float16", **options}, steps=3, spoilt=spoilt)
    for result in results:
        assert result["skipped"] == [False] and words in result["error"]


def test_bfloat16_has_no_scale_and_skips_nothing(run):
    (result,) = run(Plan(), {"dtype": "bfloat16"}, spoilt={"1": "decoder.layers.1.mlp_norm.weight"})
    assert result["scale"] == [None] and result["error"].startswith("gradient norm is")


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    "plan",
    [
        Plan(),
        Plan(sharding=2),
        Plan(sharding=4, sharding_stage=3),
        Plan(sharding=2, sharding_stage=2, sharding_offload=True),
        Plan(dp=2, pp=2),  # Fleet would send the values to the replicas, packed
        Plan(pp=2, sharding=2, sharding_stage=3),
        Plan(mp=2, sharding=2),
    ],
    ids=str,
)
def test_the_start_takes_little_more_than_what_is_kept(comparison, plan):
    """The float32 values of one parameter, or one stage of layers as they are made."""
    sizes = {"hidden_size": 64, "num_layers": 4, "ffn_hidden_size": 256}
    results = comparison.pools.run(
        plan,
        "tests.parity.low_precision:start",
        extra={f"Model.{key}": value for key, value in sizes.items()},
    )
    for result in results:
        assert result["peak"] <= 1.1 * result["kept"]
    peak, predicted = (max(result[what] for result in results) for what in ("peak", "predicted"))
    assert peak == pytest.approx(predicted, rel=0.01)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("stage", "options", "steps"),
    [
        (2, {"enable": False}, 4),
        (3, {"enable": False}, 4),
        (2, FROM_ABOVE, 8),
        (3, {"dtype": "bfloat16", "main_grad_fp32": False}, 4),
    ],
    ids=["float32, stage 2", "float32, stage 3", "float16, stage 2", "bfloat16, stage 3"],
)
def test_offload_changes_no_bit(run, stage, options, steps):
    """Of losses, norms, weights, masters and moments, in each step; overflows are skipped alike."""
    plans = [Plan(sharding=2, sharding_stage=stage, sharding_offload=offload) for offload in (False, True)]
    plain, offloaded = (run(plan, options, micro_batch_size=4, steps=steps) for plan in plans)
    assert offloaded == plain
    if options is FROM_ABOVE:
        assert plain[0]["skipped"][0] and not plain[0]["skipped"][-1]


@pytest.mark.parametrize("plan", [Plan(), Plan(sharding=2, sharding_stage=2)], ids=str)
def test_gradients_summed_in_16_bits(run, one_card, plan):
    """Another sum than in float32, as asked for; masters are kept all the same."""
    wide = one_card({"dtype": "bfloat16", "level": "O2"})
    narrow = run(plan, {"dtype": "bfloat16", "main_grad_fp32": False})
    assert narrow[0]["grad_norm"] != wide["grad_norm"]
    assert difference(narrow, wide) <= TOLERANCE["bfloat16"]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_lists_of_operations(run, one_card, level):
    """Matrix products taken from Paddle's list are computed in float32; an unknown name changes nothing."""
    options = {"dtype": "bfloat16", "level": level}
    plain = one_card(options, steps=2)
    (black,) = run(Plan(), {**options, "custom_black_list": "[matmul,linear_v2]"}, steps=2)
    (same,) = run(Plan(), {**options, "custom_white_list": "[matmul]"}, steps=2)
    assert black["loss"] != plain["loss"] and same["loss"] == plain["loss"]
    assert black["loss"] == pytest.approx(plain["loss"], rel=2e-3)


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 8e-3), ("float16", 1e-3)])
def test_close_to_float32(run, one_card, dtype, tolerance):
    """Within two rounding steps of the type; gradient norms too, which the loss scale must not be in."""
    exact = run(Plan(), {"enable": False})[0]
    low = one_card({"dtype": dtype, "level": "O2"})
    for key in ("loss", "grad_norm"):
        worst = apart(low[key], exact[key])
        assert 0 < worst <= tolerance, (key, worst)
