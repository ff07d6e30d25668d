"""Between ranks only what every library of collectives has is reduced, and sums keep their bits."""

import pytest

from ppfleetx.config.plan import ParallelPlan as Plan

HALF = {"Engine.mix_precision.enable": True, "Engine.mix_precision.dtype": "float16"}
QUANTIZED = {
    "Compress.Quantization.enable": True,
    "Compress.Quantization.activation_quantize_type": "moving_average_abs_max",
}
ON_CPUS_ALONE = "all_reduce of float64 in nn/loss.py:parallel_token_loss"
"""Of an evaluation: on a card the same sum is one of float32."""
PRUNED = {"Compress.Prune.enable": True, "Compress.Prune.ratio": 0.5, "Compress.Prune.begin_step": 0}


@pytest.mark.parametrize(
    ("plan", "extra"),
    [
        (Plan(dp=2), {}),
        (Plan(dp=2), HALF),
        (Plan(mp=2), {}),
        (Plan(mp=2), {**HALF, "Engine.mix_precision.level": "O2"}),
        (Plan(mp=2), QUANTIZED),
        (Plan(mp=2), PRUNED),
        (Plan(mp=2, sequence_parallel=True), {}),
        (Plan(pp=2), {}),
        (Plan(sep=2), {}),
        (Plan(sharding=2), {}),
        (Plan(sharding=2, sharding_stage=2), {"Distributed.sharding.reduce_overlap": False}),
        (Plan(sharding=2, sharding_stage=3), {}),
    ],
    ids=str,
)
def test_a_run_reduces_what_every_library_can(comparison, plan, extra):
    target = "tests.parallel.reductions:of_a_run"
    for found, refused in comparison.pools.run(plan, target, extra=extra):
        assert set(refused) <= {ON_CPUS_ALONE}
        assert found or plan.pp == 2, "nothing is noted"


def test_scores_reduce_what_every_library_can(comparison):
    assert [refused for _, refused in comparison.pools(2).run("tests.parallel.reductions:of_scores")] == [
        []
    ] * 2


@pytest.mark.parametrize("degrees", [{"dp": 2}, {"dp": 4}, {"mp": 2, "dp": 2}], ids=str)
@pytest.mark.parametrize("shape", [[], [3, 5]], ids=["scalar", "several"])
def test_sums_have_the_bits_of_a_reduction(comparison, degrees, shape):
    """In the order of the ranks, whatever the size of the numbers; each rank has the same."""
    size = 4 if 4 in degrees.values() or len(degrees) > 1 else 2
    results = comparison.pools(size).run("tests.parallel.reductions:two_ways", degrees=degrees, shape=shape)
    for gathered, values, reduced in results:
        assert gathered == values == reduced
        assert gathered == results[0][0]
