"""Optimizers that need whole matrices: Muon, and `examples/whole_matrix_rule.py` and `adafactor.py`."""

import pytest

from ppfleetx.config.parallel_plan import ParallelPlan as Plan
from tests.parity import training

TRAIN_PART = "tests.parity.test_whole_matrices:train_part"
OPTIMIZER = {"Optimizer.name": "NormalizedMatrices", "Optimizer.lr.max_lr": 0.01, "Model.num_layers": 2}
MUON = {
    **OPTIMIZER,
    "Optimizer.name": "Muon",
    "Optimizer.groups": [{"kinds": ["word_embedding"], "lr_factor": 0.5}],
    "Optimizer.layer_decay": 0.9,
    "Model.hidden_act": "swiglu",
}
ADAFACTOR = {**OPTIMIZER, "Optimizer.name": "Adafactor"}
PLANS = [
    Plan(mp=2, sharding=2),
    Plan(mp=2, sharding=2, sharding_stage=2, sequence_parallel=True),
    Plan(sharding=2, sharding_stage=3),
    Plan(pp=2, mp=2),
]


def train_part(**arguments):
    import examples.adafactor
    import examples.whole_matrix_rule  # noqa: F401 registers the optimizer

    return training.train_part(**arguments)


@pytest.mark.slow_after(3)
@pytest.mark.parametrize(
    ("plan", "optimizer"),
    [
        *(pytest.param(plan, OPTIMIZER, id=f"example {plan}") for plan in PLANS),
        *(pytest.param(plan, MUON, id=f"Muon {plan}") for plan in PLANS),
        pytest.param(PLANS[0], ADAFACTOR, id=f"Adafactor {PLANS[0]}"),
    ],
)
def test_whole_matrices_move_as_on_one_card_and_a_run_resumes_bit_for_bit(
    comparison, tmp_path, plan, optimizer
):
    def run(plan, first, end, **more):
        return comparison.train_part(plan, first, end, train=TRAIN_PART, extra=optimizer, **more)

    one = run(Plan(), 0, 4)
    whole = run(plan, 0, 4, save_to=str(tmp_path / "whole"))
    assert whole == pytest.approx(one, rel=1e-5)
    begun = run(plan, 0, 2, save_to=str(tmp_path))
    resumed = run(plan, 2, 4, load_from=str(tmp_path / "epoch_0_step_2"))
    assert begun + resumed == whole
    elsewhere = run(Plan(), 2, 4, load_from=str(tmp_path / "epoch_0_step_2"))
    assert elsewhere == pytest.approx(whole[4:], rel=1e-5)


def test_the_rule_sees_no_slices(comparison):
    """Of a rule that is given slices the numbers depend on the plan."""
    plan = Plan(mp=2)
    one, two = (comparison.train_part(p, 0, 3, train=TRAIN_PART, extra=OPTIMIZER) for p in (Plan(), plan))
    slices = comparison.train_part(plan, 0, 3, train=f"{TRAIN_PART}_of_slices", extra=OPTIMIZER)
    assert two == pytest.approx(one, rel=1e-5)
    assert slices != pytest.approx(one, rel=1e-4)


def train_part_of_slices(**arguments):
    import pytest

    from examples.whole_matrix_rule import NormalizedMomentum

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NormalizedMomentum, "needs_whole", False)
        return training.train_part(**arguments)
