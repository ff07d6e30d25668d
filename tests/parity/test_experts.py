"""A run of a mixture of experts goes on under another plan of experts; ``make parity`` runs more pairs."""

import pytest

from tests.parity.comparison import TOLERANCE
from tests.parity.experts import RESUMED, resumed


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("pair", RESUMED[4:7], ids=lambda pair: " -> ".join(map(str, pair)))
def test_a_run_goes_on_under_another_plan(comparison, tmp_path, pair):
    assert resumed(comparison, pair, tmp_path) <= TOLERANCE
