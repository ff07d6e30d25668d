"""The training program in 16 bits (kernels emulated): skipped steps, metrics, checkpoints."""

from typing import Any

import numpy as np
import pytest

from ppfleetx.config.parallel_plan import ParallelPlan as Plan
from tests.e2e.program import records as recorded
from tests.e2e.program import values_of

ONE = Plan()
# 2^24 times the gradient is more than float16 holds: the first steps overflow.
HALF = {"enable": True, "dtype": "float16", "scale_loss": 2.0**24, "hysteresis": 1, "incr_every_n_steps": 3}


@pytest.fixture
def train(pools, corpus, tmp_path):
    """Run the program; gives its output directory."""

    def run(
        name: str, precision: dict[str, Any], plan: Plan = ONE, expected: str = "", **overrides: Any
    ) -> Any:
        output_dir = tmp_path / name
        given = {
            "Model.num_layers": 2,
            "Engine.max_steps": 12,
            "Engine.save_load.save_steps": 0,
            **{f"Engine.mix_precision.{key}": value for key, value in precision.items()},
            **{key.replace("__", "."): value for key, value in overrides.items()},
        }
        values = values_of(plan, corpus, output_dir, micro_batch_size=4, overrides=given)
        errors = pools(plan.world_size).run(
            "tests.parity.low_precision:program", values=values, world=plan.world_size
        )
        assert all(expected in error if expected else error == "" for error in errors), errors
        return output_dir

    return run


def records(output_dir):
    lines = (output_dir / "metrics.jsonl").read_text()
    assert "NaN" not in lines and "Infinity" not in lines, "JSON has none"
    return recorded(output_dir, "train")


def progress(output_dir):
    """What a resumed run must repeat bit for bit."""
    keys = ("step", "loss", "grad_norm", "lr", "loss_scale", "found_inf", "skipped_steps", "consumed_samples")
    return [{key: record.get(key) for key in keys} for record in records(output_dir)]


@pytest.fixture
def whole(train):
    return train("whole", HALF)


def test_a_skipped_step_uses_its_samples_and_moves_nothing_else(whole, train):
    """Learning rates are those of the steps taken, in their order; samples go on."""
    half, exact = records(whole), records(train("exact", {"enable": False}))
    skipped = [record["found_inf"] for record in half]
    assert skipped[:3] == [1, 1, 1] and 3 < sum(skipped) < 12
    taken = [record for record in half if not record["found_inf"]]
    rates = [record["lr"] for record in exact]
    assert [record["lr"] for record in taken] == rates[: len(taken)]
    # A skipped step is tried with the rate of the next step that is taken.
    for step, record in enumerate(half):
        assert record["lr"] == rates[sum(1 for flag in skipped[:step] if not flag)]
        assert (record["grad_norm"] is None) == bool(record["found_inf"])
        assert record["skipped_steps"] == sum(skipped[: step + 1])
    assert [record["consumed_samples"] for record in half] == [16 * step for step in range(1, 13)]
    scale, quiet = 2.0**24, 0
    for record in half:
        assert record["loss_scale"] == scale
        quiet = 0 if record["found_inf"] else quiet + 1
        if record["found_inf"]:
            scale /= 2
        elif quiet == 3:
            scale, quiet = scale * 2, 0


def test_samples_of_skipped_steps_do_not_count_for_the_rate(train):
    lengths = {
        "unit": "sample",
        "warmup_steps": 0,
        "decay_steps": 1000,
        "decay_style": "linear",
        "min_lr": 0.0,
    }
    growing = {"Global__rampup_batch_size": "[4,4,60]", "Engine__max_steps": 10}
    given = {f"Optimizer__lr__{name}": value for name, value in lengths.items()}
    taken = before = 0
    for record in records(train("growing", HALF, **given, **growing, Optimizer__lr__max_lr=1.0)):
        size = record["consumed_samples"] - before
        assert record["lr"] == pytest.approx(1 - (taken + size) / 1000)
        taken += 0 if record["found_inf"] else size
        before = record["consumed_samples"]
    assert 0 < taken < before


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("save_at", "hysteresis"), [(2, 1), (10, 1), (2, 3)])
def test_a_resumed_run_repeats_the_uninterrupted_one(train, save_at, hysteresis):
    """Stopped among the skipped steps, in the middle of a window, and before the last tolerated overflow."""
    precision = {**HALF, "hysteresis": hysteresis}
    whole = train("whole", precision)
    assert records(whole)[save_at]["found_inf"] == (save_at == 2)
    first = train("first", precision, Engine__save_load__save_steps=save_at)
    ckpt_dir = str(first / f"epoch_0_step_{save_at}")
    second = train("second", precision, Engine__save_load__ckpt_dir=ckpt_dir)
    assert progress(second) == progress(whole)[save_at:]


@pytest.mark.slow_after(1)
def test_under_another_plan_the_scale_goes_on(whole, train):
    first = train("first", HALF, Engine__save_load__save_steps=10)
    ckpt_dir = str(first / "epoch_0_step_10")
    second = train("second", HALF, Plan(mp=2), Engine__save_load__ckpt_dir=ckpt_dir)
    for mine, expected in zip(progress(second), progress(whole)[10:], strict=True):
        assert mine["loss_scale"] == expected["loss_scale"]
        assert mine["skipped_steps"] == expected["skipped_steps"]
        assert mine["loss"] == pytest.approx(expected["loss"], rel=1e-3)


@pytest.mark.slow
def test_offload_comes_and_goes_at_a_checkpoint(train):
    """Masters and moments saved from host memory, in the background, go on where they are on the device, and
    the other way round: bit for bit."""
    plans = [Plan(sharding=2, sharding_stage=stage, sharding_offload=stage == 2) for stage in (2, 3)]
    saving = {
        "Engine__save_load__save_steps": 5,
        "Engine__save_load__async_save": True,
        "Engine__max_steps": 8,
    }
    wholes = [train(f"whole{number}", HALF, plan, **saving) for number, plan in enumerate(plans)]
    assert progress(wholes[0]) == progress(wholes[1])
    assert [record["found_inf"] for record in records(wholes[0])][-1] == 0
    for number, plan in enumerate(plans):
        ckpt_dir = str(wholes[1 - number] / "epoch_0_step_5")
        again = train(f"again{number}", HALF, plan, Engine__save_load__ckpt_dir=ckpt_dir, Engine__max_steps=8)
        assert progress(again) == progress(wholes[number])[5:]
        assert_same_weights(wholes[number] / "epoch_0_step_8", again / "epoch_0_step_8")


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_go_between_precisions_without_loss(train, pools, dtype):
    """From float32 to 16 bits the masters are the float32 weights, and back the weights are the masters."""
    exact = train("exact", {"enable": False}, Engine__max_steps=2)
    start = {"Engine__save_load__init_from": str(exact / "epoch_0_step_2"), "Engine__max_steps": 2}
    # A learning rate of nothing: the masters stay what they were loaded as.
    still = {"Optimizer__lr__max_lr": 1e-30, "Optimizer__lr__min_lr": 0.0}
    low = train("low", {"enable": True, "dtype": dtype}, **start, **still)
    checkpoint = str(low / "epoch_0_step_2")
    (types,) = pools(1).run("tests.parity.low_precision:tensors_of", checkpoint=checkpoint)
    name = "decoder.layers.0.mlp.fc1.weight"
    assert types[f"model/{name}/"] == {"float16": "F16", "bfloat16": "BF16"}[dtype]
    assert types[f"optimizer/{name}/master_weight"] == types[f"optimizer/{name}/moment1"] == "F32"
    start["Engine__save_load__init_from"] = str(low / "epoch_0_step_2")
    back = train("back", {"enable": False}, **start, **still)
    assert_same_weights(exact / "epoch_0_step_2", back / "epoch_0_step_2")


def test_at_the_smallest_scale_an_overflow_ends_the_run(train):
    """Weights that overflow float16 whatever the scale: the program says so instead of skipping for ever."""
    train(
        "stopped",
        {"enable": True, "dtype": "float16", "scale_loss": 4.0, "hysteresis": 1},
        expected="at the smallest loss scale, 1",
        Model__initializer_range=300.0,
    )


def assert_same_weights(one, other):
    before, after = weights(one), weights(other)
    assert before.keys() == after.keys()
    for key, values in before.items():
        np.testing.assert_array_equal(values, after[key], err_msg=key)


def weights(checkpoint):
    from ppfleetx.checkpoint.reader import open_checkpoint

    opened = open_checkpoint(checkpoint)
    return {name: opened.read(name) for name in opened.names()}
