"""The most memory of a card before the first step, in a step and in a save, beside what the planner says."""

import pytest

from ppfleetx.config.loader import load_config
from ppfleetx.planner.cards import any_card
from ppfleetx.planner.job import job_of
from ppfleetx.planner.parameters import held_parameters
from tests.device.conftest import PLANS_IN_A_PROCESS
from tests.device.place import place
from tests.helpers.ranks import Pools
from tests.planner import measured
from tests.planner.machine import compare_device_memory, memory_environment
from tests.planner.plans import DEVICE_PLANS, O2, SHORT_DEVICE_PLANS, device_plan_name, world_size

pytestmark = pytest.mark.device

TOLERANCE = 0.05 if place().is_reference else 0.25
"""Of predictions; what cuBLAS takes to work in is not predicted."""


@pytest.fixture(scope="module")
def pools(here):
    with Pools(device=here.device, most_calls=PLANS_IN_A_PROCESS, **memory_environment()) as pools:
        yield pools


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(one, id=f"short: {device_plan_name(*one)}") for one in SHORT_DEVICE_PLANS),
        *(pytest.param(one, id=device_plan_name(*one)) for one in DEVICE_PLANS),
    ],
)
def test_peaks_are_predicted(
    pools, need_cards, need_type, corpus, device, here, tmp_path, record_property, case
):
    """Of the fullest rank of each pipeline stage; and a start takes no more than a step."""
    _, plan, more = case
    need_cards(world_size(plan))
    if O2.items() <= more.items() and not here.is_reference:
        need_type("bfloat16")
    rows = compare_device_memory(
        pools, case, device, corpus, tmp_path / "run", is_reference=here.is_reference
    )
    record_property("errors", {row.what: round(row.error, 4) for row in rows})
    wrong = [row for row in rows if abs(row.error) > TOLERANCE]
    assert not wrong
    measured = {row.what: row.measured for row in rows}
    assert all(value <= measured[what.replace("start", "step")] for what, value in measured.items())


def test_experts_add_their_weights_and_nothing_else(pools, corpus, here, device, tmp_path, record_property):
    """The peak of a step without parameters, gradients and states; each position has two experts."""
    working = {}
    for experts in (4, 8, 16, 32):
        values = {
            **measured.SIZES,
            **measured.FAMILIES["llama"],
            "Model.moe.num_experts": experts,
            "Model.moe.expert_ffn_size": 192,
            "Global.micro_batch_size": 4,
            "Engine.max_steps": 2,
            "Engine.eval_freq": 0,
            "Engine.save_load.save_steps": 0,
            "Engine.save_load.output_dir": str(tmp_path / str(experts)),
            "Data.Train.dataset.input_dir": str(corpus),
            "Data.Eval.dataset.input_dir": str(corpus),
            "Global.device": device,
        }
        settings = [f"{key}={value}" for key, value in values.items()]
        trained = held_parameters(job_of(load_config(measured.CONFIG, settings), any_card(device)), 0).trained
        (found,) = pools(1).run(
            "tests.device.cases.memory:peaks",
            timeout=300.0,
            values=values,
            world=1,
            is_reference=here.is_reference,
        )
        working[experts] = found["step"] - 16 * trained  # value, gradient and two moments of 4 bytes
        record_property(f"experts_{experts}", {"peak": found["step"], "trained": trained})
    assert working[4] > 0
    assert working[32] <= 1.05 * working[4], working
