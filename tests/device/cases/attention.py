"""In a rank: flash attention against the reference in float32 on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle

from ppfleetx.config.errors import ConfigError
from ppfleetx.nn.attention_kernels import KernelOptions, attend, reference_attention
from ppfleetx.nn.flash import flash_attention, flash_obstacle
from tests.device.cases.numbers import Operator, apart, number, on, run

BATCH, LENGTH = 2, 96
DOCUMENT_BEGINS = (0, 17, 64)
_REFERENCE = KernelOptions("reference")


def compare(
    device: str, dtype: str, head_size: int, groups: int, per_group: int, packed: bool, trains: bool
) -> dict[str, Any]:
    """Result and gradients of the kernel that ``flash`` gives, compared as in ``cases/numbers.py``.

    Where flash cannot serve, ``obstacle`` says why, ``refused`` whether asking for it is refused, and
    what is compared is the reference on the device, which ``auto`` takes then.
    """
    shape = (BATCH, groups, per_group, LENGTH, head_size)
    with on(device, dtype):
        query, dropout = paddle.zeros(shape, dtype), _dropout(0.0, trains)
        obstacle = flash_obstacle(query, dropout, has_documents=packed)
        kernel = flash_attention if obstacle is None else _reference
        found = run(_operator(kernel, shape, packed, trains), dtype, rounded_to=dtype, trains=trains)
        refused = obstacle is not None and _is_refused(query, dropout)
    with on("cpu", "float32"):
        expected = run(
            _operator(_reference, shape, packed, trains), "float32", rounded_to=dtype, trains=trains
        )
    differences = {name: apart(found[name], expected[name]) for name in expected}
    return {"obstacle": obstacle or "", "refused": refused, "differences": differences}


def _reference(*arguments: Any) -> paddle.Tensor:
    return reference_attention(*arguments, _REFERENCE)


def _dropout(probability: float, trains: bool) -> paddle.nn.Dropout:
    dropout = paddle.nn.Dropout(probability)
    dropout.train() if trains else dropout.eval()
    return dropout


def _is_refused(query: paddle.Tensor, dropout: paddle.nn.Dropout) -> bool:
    key = query[:, :, 0]
    try:
        attend(query, key, key, None, dropout, KernelOptions("flash"))
    except ConfigError as error:
        return "flash attention cannot run here" in str(error)
    return False


def _operator(kernel: Any, shape: tuple[int, ...], packed: bool, trains: bool) -> Operator:
    key_shape = (*shape[:2], *shape[3:])

    def call(query: paddle.Tensor, key: paddle.Tensor, value: paddle.Tensor) -> paddle.Tensor:
        return kernel(query, key, value, _starts() if packed else None, _dropout(0.0, trains))

    return Operator({"query": shape, "key": key_shape, "value": key_shape}, call)


def _starts() -> paddle.Tensor:
    """``document_start [b, s]``: three documents in the first row, one in the others."""
    starts = np.zeros([BATCH, LENGTH], np.int32)
    for begin in DOCUMENT_BEGINS:
        starts[0, begin:] = begin
    return paddle.to_tensor(starts)


def dropped(device: str, dtype: str, probability: float) -> dict[str, float]:
    """With all values 1, the mean of what attention gives: what the kept weights sum to. Twice with one seed,
    and with another."""
    shape = (BATCH, 4, 1, LENGTH, 64)
    with on(device, dtype):
        query = paddle.zeros(shape, dtype)
        key = query[:, :, 0]
        value = paddle.ones_like(key)
        drop = _dropout(probability, True)
        obstacle = flash_obstacle(query, drop, has_documents=False)
        kernel = flash_attention if obstacle is None else _reference
        outputs = []
        for seed in (1, 1, 2):
            paddle.seed(seed)
            outputs.append(number(kernel(query, key, value, None, drop)))
    return {
        "flash": obstacle is None,
        "mean": float(outputs[0].mean()),
        "same seed": float(np.abs(outputs[0] - outputs[1]).max()),
        "other seed": float(np.abs(outputs[0] - outputs[2]).max()),
    }
