"""In a rank: what gives the same bits twice, and how exact float32 is."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle.base import core

from ppfleetx.distributed.device import allow_tf32
from ppfleetx.nn.flash import flash_attention, flash_obstacle
from tests.device.cases.numbers import number, on
from tests.device.place import DETERMINISTIC
from tests.operators.host_syncs import HostSyncs

_TIMES = 5


def repeated(what: str, device: str, deterministic: bool) -> dict[str, Any]:
    """Whether ``embedding`` or ``flash`` gives the same gradients each time; and their largest difference."""
    with on(device, "float32"):
        if device == "gpu":
            paddle.set_flags({name: v if deterministic else type(v)(0) for name, v in DETERMINISTIC.items()})
        make = {"embedding": _embedding_gradient, "flash": _flash_gradient}[what]
        found = [make(device) for _ in range(_TIMES)]
    worst = max(float(np.abs(one - found[0]).max()) for one in found)
    return {"equal": all(np.array_equal(one, found[0]) for one in found), "difference": worst}


def _embedding_gradient(device: str) -> np.ndarray:
    draw = np.random.default_rng(1)
    table = paddle.to_tensor(draw.standard_normal([16, 256]).astype(np.float32), stop_gradient=False)
    ids = paddle.to_tensor(draw.integers(0, 16, [64, 128]))  # 512 rows fall on each
    upstream = draw.standard_normal([64, 128, 256]).astype(np.float32)
    F.embedding(ids, table).backward(paddle.to_tensor(upstream))
    return number(table.grad)


def _flash_gradient(device: str) -> np.ndarray:
    draw = np.random.default_rng(2)
    shape = (2, 4, 1, 512, 64)
    kind = "float16" if device == "gpu" else "float32"
    query = paddle.to_tensor(draw.standard_normal(shape).astype(np.float32)).astype(kind)
    query.stop_gradient = False
    key = query.detach()[:, :, 0]
    dropout = paddle.nn.Dropout(0.0)
    if flash_obstacle(query, dropout, has_documents=False) is None:
        output = flash_attention(query, key, key, None, dropout)
    else:
        output = (query @ key.unsqueeze(2).transpose([0, 1, 2, 4, 3])) @ key.unsqueeze(2)
    output.backward(paddle.ones_like(output))
    return number(query.grad)


def matmul_error(device: str, tf32: bool) -> float:
    """Largest error of a float32 product of 1024 x 1024 against float64, relative to the largest element."""
    draw = np.random.default_rng(0)
    a, b = (draw.standard_normal([1024, 1024]).astype(np.float32) for _ in range(2))
    with on(device, "float32"):
        allow_tf32(tf32)
        found = number(paddle.matmul(paddle.to_tensor(a), paddle.to_tensor(b)))
        allow_tf32(False)
    expected = a.astype(np.float64) @ b.astype(np.float64)
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def reads_of_a_step(device: str, **run: Any) -> dict[str, Any]:
    """How often a step of training waits for the device to tell a number, and how long a step takes.

    Args:
        run: arguments of ``tests.parity.training.build``.
    """
    from tests.parity.training import build, take_step

    syncs = HostSyncs()
    with paddle.utils.unique_name.guard():
        extra = {**run.pop("extra", {}), "Global.device": device}
        cfg, ctx, runner = build(**run, extra=extra)
        for step in range(2):
            take_step(runner, step, cfg, ctx)
        begin = time.perf_counter()
        with syncs.watching():
            take_step(runner, 2, cfg, ctx)
    seconds = time.perf_counter() - begin
    return {"reads": syncs.totals()["reads"], "by place": syncs.places()["reads"], "seconds": seconds}


def reads_on_branches_of_a_card(**run: Any) -> dict[str, Any]:
    """:func:`reads_of_a_step` of a CPU that takes the branches of a card."""
    with mock.patch.object(core.Place, "is_cpu_place", lambda _: False):
        return reads_of_a_step("cpu", **run)
