"""No kernel runs that a GPU lacks: a few runs on every test, all of them in ``make operators``."""

import pytest

from tests.operators.scenarios import CASES, few
from tests.operators.table import arguments_of, unknown, write_runs

CURE = "python -m tests.operators table, and docs/gpu.md"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return write_runs(tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("scenario", [*few()], ids=lambda scenario: scenario.name)
def test_only_kernels_of_the_table_run(pools, runs, scenario):
    found = pools(scenario.world).run(CASES + scenario.case, **arguments_of(scenario, runs))
    seen = {(kernel, dtype) for rank in found for kernel, dtype in rank}
    assert len(seen) > 40, "nothing was recorded"
    assert not unknown(seen), f"{scenario.name}: {'; '.join(unknown(seen))} ({CURE})"


def test_a_kernel_that_is_not_in_the_table_is_named():
    found = [("gelu", "float32"), ("gelu", "int64"), ("eigvalsh", "float32")]
    assert unknown(found) == [
        "eigvalsh float32 is not in the table",
        "gelu int64 is not in the table",
    ]
