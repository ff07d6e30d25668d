"""GPU checks, as far as a CPU can run them: nvidia-smi output, small runs, wrong results."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from ppfleetx.doctor import card
from ppfleetx.doctor.check import Status
from tests.doctor.conftest import by_name

CARDS = """\
0, NVIDIA A100-SXM4-80GB, 550.54.15, 81920, 4, 0, P0
1, NVIDIA A100-SXM4-80GB, 550.54.15, 81920, 40960, 0, P0
2, NVIDIA A100-SXM4-80GB, 550.54.15, 81920, 4, 3, P0
3, NVIDIA GeForce RTX 4090, 550.54.15, 24564, 11, [N/A], P8
"""
LINKS = """\
\tGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity
GPU0\t X \tNV12\tSYS\tPXB\t0-63
GPU1\tNV12\t X \tSYS\tPXB\t0-63
GPU2\tSYS\tSYS\t X \tSYS\t64-127
"""


def test_cards_as_nvidia_smi_tells_them():
    rows = by_name(card.card_rows(CARDS))
    assert [row.status for row in rows.values()] == [Status.OK, Status.WARN, Status.FAIL, Status.OK]
    assert "another program holds its memory" in rows["card 1"].fix
    assert "3 uncorrected memory errors" in rows["card 2"].found
    assert card._links(LINKS) == "1 x NV12, 2 x SYS"


def test_small_runs_agree_and_a_wrong_operator_is_named():
    assert card.operators_row("float32", "cpu").status is Status.OK
    calls = []

    def wrong(x):
        calls.append(x)
        return paddle.exp(x) * (1.0 if len(calls) % 2 else 1.001)

    row = card.operators_row("float32", "cpu", {"exp": (wrong, (np.ones((2, 2), np.float32),))})
    assert row.status is Status.FAIL and "exp by 1.0e-03" in row.found


@pytest.mark.parametrize("packed", [False, True])
def test_attention_says_why_flash_does_not_run(packed):
    row = card.attention_row("float16", packed=packed, head_sizes=(64, 128))
    assert row.status is Status.OK
    assert row.found == "heads of 64, 128 by the reference: it needs a GPU, the device is cpu"
