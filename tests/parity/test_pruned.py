"""Pruning while training equals one card; ``make parity`` runs all plans of tests/parity/pruned.py."""

import numpy as np
import pytest

from ppfleetx.config.plan import ParallelPlan as Plan
from tests.helpers.ranks import Pools
from tests.parity import pruned
from tests.parity.comparison import TOLERANCE, Comparison, fields_of, micro_batch_size_of
from tests.parity.training import SIZES

SCHEDULE = "along a schedule"
CHOICE = [
    (Plan(dp=2), "llama"),
    (Plan(mp=2), "mixed"),
    (Plan(pp=2), "gpt"),
    (Plan(sep=2), "llama"),
    (Plan(sharding=2), "gpt"),
    (Plan(sharding=2, sharding_stage=2), "gpt"),
    (Plan(sharding=2, sharding_stage=3), "llama"),
    (Plan(pp=2, virtual_pp_degree=2), "llama"),
    (Plan(mp=2, pp=2), "gpt"),
]


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    pools = Pools()
    yield Comparison(pools, tmp_path_factory.mktemp("pruned"), train=pruned.TRAIN)
    pools.close()


@pytest.mark.parametrize(("plan", "model"), CHOICE, ids=str)
def test_losses_gradients_and_weights(comparison, plan, model):
    found = comparison.run(plan, model, "sgd", extra=pruned.FORMS[SCHEDULE])
    assert found.first == 0
    assert found.worst <= TOLERANCE, str(found)


@pytest.mark.parametrize("model", ["gpt", "llama", "mixed"])
def test_whole_groups_and_units_are_zero(comparison, model):
    _, directory = comparison.reference(
        model, "adamw", 8, extra={**pruned.FORMS[SCHEDULE], "Model.num_layers": 4}
    )
    groups, units = (16 if model == "gpt" else 8), SIZES["ffn_hidden_size"]
    with np.load(f"{directory}/last.npz") as last:
        for layer in range(4):
            for block, parts in (("attention", groups), ("mlp", units)):
                into, out = ("qkv", "out_proj") if block == "attention" else ("fc1", "fc2")
                names = [f"decoder.layers.{layer}.{block}.{into}.weight"]
                names += [name for name in (names[0].replace("weight", "bias"),) if name in last.files]
                zero = [(last[name] == 0).reshape(-1, parts, last[name].shape[-1] // parts) for name in names]
                gone = [where.all(axis=(0, 2)) for where in zero]
                rows = last[f"decoder.layers.{layer}.{block}.{out}.weight"].reshape(parts, -1)
                gone.append((rows == 0).all(axis=1))
                assert all((one == gone[0]).all() for one in gone)
                assert gone[0].sum() == parts // 4


PART = {
    "train": "tests.parity.pruned:train_part",
    "timeout": 120.0,
    "model": "llama",
    "extra": pruned.FORMS[SCHEDULE],
}


@pytest.mark.parametrize("plan", [Plan(), Plan(mp=2, pp=2), Plan(sharding=2, sharding_stage=3)], ids=str)
def test_resumption_in_the_middle_of_a_schedule_is_exact(comparison, tmp_path, plan):
    expected = comparison.train_part(plan, 0, 5, **PART)
    numbers = comparison.train_part(plan, 0, 2, save_to=str(tmp_path), **PART)
    numbers += comparison.train_part(plan, 2, 5, load_from=str(tmp_path / "epoch_0_step_2"), **PART)
    assert numbers == expected


def test_plans_change_at_each_resumption(comparison, tmp_path):
    expected = comparison.train_part(Plan(), 0, 6, **PART)
    plans = (Plan(mp=2), Plan(sharding=2, sharding_stage=3), Plan(pp=2))
    assert comparison.train_along(plans, tmp_path, **PART) == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.parametrize("plan", [Plan(), Plan(mp=2), Plan(sharding=2, sharding_stage=2)], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_master_weights_stay_zero_too(comparison, plan, dtype):
    results = comparison.pools(plan.world_size).run(
        "tests.parity.pruned:train_in_16_bits",
        timeout=120.0,
        plan=fields_of(plan),
        world_size=plan.world_size,
        micro_batch_size=micro_batch_size_of(plan),
        mix_precision={"dtype": dtype, "level": "O2", "scale_loss": 1024.0},
        extra={**pruned.FORMS[SCHEDULE], "Model.num_layers": 4},
    )
    assert "master_weight" in results[0]["states"]
    assert results[0]["error"] == ""
