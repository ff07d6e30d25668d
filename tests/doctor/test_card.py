"""What runs on GPUs alone, as far as a CPU can try it, and the losses of GPT and Llama."""

from __future__ import annotations

import json

import numpy as np
import paddle
from paddle.base import core

from ppfleetx.config.loader import load_config
from ppfleetx.distributed import device
from ppfleetx.doctor import card, golden_losses
from ppfleetx.doctor.results import Status, Target, ok
from ppfleetx.parallel import mixed_precision
from tests.doctor.conftest import by_name
from tests.parity.training import CONFIG

CARDS = """\
0, NVIDIA A100-SXM4-80GB, 550.54.15, 81920, 4, 0, P0
1, NVIDIA A100-SXM4-80GB, 550.54.15, 81920, 40960, 0, P0
2, NVIDIA A100-SXM4-80GB, 550.54.15, 81920, 4, 3, P0
3, NVIDIA GeForce RTX 4090, 550.54.15, 24564, 11, [N/A], P8
"""


def test_cards_as_nvidia_smi_tells_them():
    rows = by_name(card.card_rows(CARDS))
    assert [row.status for row in rows.values()] == [Status.OK, Status.WARN, Status.FAIL, Status.OK]
    assert "another program holds its memory" in rows["card 1"].fix
    assert "3 uncorrected memory errors" in rows["card 2"].found


def test_small_runs_agree_and_a_wrong_operator_is_named():
    assert card.operators_row("float32", "cpu").status is Status.OK
    calls = []

    def wrong(x):
        calls.append(x)
        return paddle.exp(x) * (1.0 if len(calls) % 2 else 1.001)

    row = card.operators_row("float32", "cpu", {"exp": (wrong, (np.ones((2, 2), np.float32),))})
    assert row.status is Status.FAIL and "exp by 1.0e-03" in row.found


def test_a_card_that_may_use_tf32_is_compared_without():
    """TF32 is off by 3e-4 in a product of 32 numbers: three times what is allowed."""
    switch = core.get_cublas_switch()
    used = []

    def product(x):
        used.append(core.get_cublas_switch())
        return paddle.matmul(x, x)

    try:
        core.set_cublas_switch(True)
        card.operators_row("float32", "cpu", {"matmul": (product, (np.ones((2, 2), np.float32),))})
    finally:
        core.set_cublas_switch(switch)
    assert used == [False, False]


def test_a_type_that_the_card_lacks_is_not_tried(monkeypatch):
    """A V100 has no bfloat16: that fails where the configuration asks for it, and nowhere else."""
    for module in (device, mixed_precision):
        monkeypatch.setattr(module, "has_kernels", lambda dtype: dtype == "float16")
    tried = []
    monkeypatch.setattr(card, "operators_row", lambda dtype, _: tried.append(dtype) or ok("x", "y"))
    monkeypatch.setattr(card, "TABLE", {})
    target = Target(device="gpu")
    list(card.small_operators(target))
    assert tried == ["float32", "float16"]
    monkeypatch.setattr(golden_losses, "train", lambda *_: [1.0])
    monkeypatch.setattr(golden_losses, "losses_row", lambda name, *_: ok(name, "as they should be"))
    rows = by_name(golden_losses.losses(target))
    statuses = {row.status for name, row in rows.items() if "bfloat16" in name}
    assert statuses == {Status.SKIPPED} and rows["GPT float16 O2"].status is Status.OK
    assert card._lacking("bfloat16", "gpu:0", target).status is Status.SKIPPED
    row = card._lacking("bfloat16", "gpu:0", Target(cfg=load_config(CONFIG), device="gpu"))
    assert row.status is Status.FAIL and "gpu:0 does not compute in bfloat16" in row.found


def test_losses_are_those_that_are_committed_and_a_wrong_kernel_is_found(monkeypatch):
    rows = by_name(golden_losses.losses(Target()))
    assert rows["GPT float32"].status is rows["Llama float32"].status is Status.OK
    assert rows["Llama 16 bits"].status is Status.SKIPPED
    right = paddle.nn.functional.softmax
    monkeypatch.setattr(golden_losses, "MODELS", {"Llama": golden_losses.MODELS["Llama"]})
    monkeypatch.setattr(paddle.nn.functional, "softmax", lambda x, *a, **k: right(x, *a, **k) * 1.01)
    row = by_name(golden_losses.losses(Target()))["Llama float32"]
    assert row.status is Status.FAIL and row.numbers["relative_error"] > golden_losses.TOLERANCE["cpu"]
    assert "another version of Paddle" in row.fix


def test_a_loss_that_is_no_number_is_found():
    golden = json.loads(golden_losses.GOLDEN.read_text())["losses"]["GPT"]
    for found in ([golden[0], float("nan"), 0.0], [loss * (1 + 2e-5) for loss in golden]):
        assert golden_losses.losses_row("GPT", found, golden, 1e-5).status is Status.FAIL
