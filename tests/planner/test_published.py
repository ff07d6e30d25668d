"""Predictions against published runs; the bounds are those of docs/planner.md."""

import statistics

import pytest

from ppfleetx.planner.cards import load_card
from ppfleetx.planner.flops import step_flops, tflops_per_device
from ppfleetx.planner.network import Cluster
from ppfleetx.planner.step_time import step_time
from tests.planner.published import case_of_row, rows_of

A100 = load_card("A100-80GB")


def errors(name: str, *, vocab_size: int = 51_200, gigabits: float = 1600) -> list[float]:
    """Predicted over measured seconds, minus 1, of each row."""
    cluster = Cluster(A100, network=gigabits * 1e9 / 8)
    rows = rows_of(name)
    assert rows
    predicted = [step_time(case_of_row(row, vocab_size), cluster).seconds for row in rows]
    return [seconds / float(row["seconds"]) - 1 for seconds, row in zip(predicted, rows, strict=True)]


@pytest.mark.parametrize(
    ("name", "vocab_size", "bound"),
    [("korthikanti.csv", 51_200, 0.07), ("sc21.csv", 51_200, 0.12), ("megascale.csv", 64_000, 0.10)],
)
def test_every_row_is_within(name, vocab_size, bound):
    assert max(abs(error) for error in errors(name, vocab_size=vocab_size)) <= bound


def test_half_of_the_held_out_plans_are_within_8_percent():
    held_out = errors("vtrain.csv", gigabits=800)[1::2]
    assert statistics.median(abs(error) for error in held_out) <= 0.08


def test_bloom_counted_the_same_operations():
    for row in rows_of("bloom.csv"):
        case = case_of_row(row, 250_880)
        counted = tflops_per_device(step_flops(case).hardware, float(row["seconds"]), case)
        assert counted == pytest.approx(float(row["tflops"]), rel=0.005)
