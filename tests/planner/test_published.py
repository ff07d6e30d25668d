"""Predictions against published runs; the bounds are those of docs/planner.md."""

import statistics

import pytest

from ppfleetx.planner.cards import load_card
from ppfleetx.planner.flops import step_flops, tflops_per_device
from tests.planner.published import (
    TIMES,
    bloom_sweep_errors,
    case_of_row,
    mpt_errors,
    regret,
    rows_of,
    time_errors,
)
from tests.planner.published_memory import bloom_memory, fleetx_memory, nanotron_memory

BOUNDS = {"korthikanti.csv": 0.07, "sc21.csv": 0.12, "megascale.csv": 0.10}


@pytest.mark.parametrize("published", [p for p in TIMES if p.name in BOUNDS], ids=lambda p: p.name)
def test_every_row_is_within(published):
    assert max(abs(error) for error in time_errors(published)) <= BOUNDS[published.name]


def test_half_of_the_held_out_plans_are_within_8_percent():
    held_out = time_errors(next(p for p in TIMES if p.held_out))
    assert statistics.median(abs(error) for error in held_out) <= 0.08


def test_the_plan_ranked_first_is_among_the_best():
    assert max(regret(next(p for p in TIMES if p.held_out)).values()) <= 0.05


def test_bloom_batch_sweep_after_calibration():
    errors = bloom_sweep_errors()
    assert len(errors) == 4
    assert max(abs(error) for error in errors) <= 0.10


@pytest.mark.parametrize("card", ["A100-80GB", "H100-80GB"])
def test_half_of_the_runs_with_fused_attention_are_within_8_percent(card):
    errors = mpt_errors(card)
    assert len(errors) >= 6
    assert statistics.median(abs(error) for error in errors) <= 0.08


def test_nanotron_memory():
    rows = nanotron_memory()
    near = [row for row in rows if abs(row.error) <= 0.10]
    assert len(rows) == 13
    assert len(near) / len(rows) >= 0.8, [(row.name, row.error) for row in rows]


def test_bloom_counted_the_same_operations():
    for row in filter(lambda row: row["tflops"], rows_of("bloom.csv")):
        case = case_of_row(row, 250_880)
        counted = tflops_per_device(step_flops(case).hardware, float(row["seconds"]), case)
        assert counted == pytest.approx(float(row["tflops"]), rel=0.005)


def test_bloom_memory_of_rows_that_were_not_fitted():
    judged = [row for row in bloom_memory() if row.measured is not None and not row.fitted]
    near = [row for row in judged if abs(row.error) <= 0.10]
    assert len(judged) == 18
    assert len(near) / len(judged) >= 0.8, [(row.name, row.error) for row in judged]


def test_what_ran_out_of_memory_does_not_fit_and_the_rest_does():
    room = load_card("A100-80GB").memory_gib
    for row in bloom_memory():
        assert (row.predicted > room) is (row.measured is None), row


def test_fleetx_recipes_need_what_it_says():
    for row in fleetx_memory():
        assert abs(row.error) <= 0.05, row
