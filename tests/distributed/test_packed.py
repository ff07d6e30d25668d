"""Collectives on many tensors at once, in one process."""

from types import SimpleNamespace

import paddle
import pytest
from paddle.base import core

from ppfleetx.distributed import collectives

BUCKET_BYTES = 100
SIZES = [10, 3, 700, 10, 10, 4, 10, 1, 10]


class Task:
    def __init__(self, complete=lambda: None) -> None:
        self.wait = complete


@pytest.fixture
def tensors(monkeypatch):
    """Five buckets of float32 and two of bfloat16; one tensor is larger than a bucket."""
    monkeypatch.setattr(collectives, "BUCKET_BYTES", BUCKET_BYTES)
    return [paddle.full([n, 1], n, dtype) for dtype in ("float32", "bfloat16") for n in SIZES]


@pytest.mark.parametrize("strides", [False, True])
def test_one_bucket_is_held_at_a_time(monkeypatch, strides):
    """By Paddle's statistics, the operations need extra memory for one bucket only."""
    monkeypatch.setattr(collectives, "BUCKET_BYTES", 1 << 20)
    before = paddle.get_flags("FLAGS_use_stride_kernel")
    paddle.set_flags({"FLAGS_use_stride_kernel": strides})
    try:
        tensors = [paddle.ones([256, 256]) for _ in range(4 * 8)]
        core.host_memory_stat_reset_peak_value("Allocated", 0)
        held = core.host_memory_stat_current_value("Allocated", 0)
        collectives._packed(tensors, lambda flat: Task())
        assert core.host_memory_stat_peak_value("Allocated", 0) - held == 1 << 20
        assert core.host_memory_stat_current_value("Allocated", 0) == held
    finally:
        paddle.set_flags(before)


@pytest.mark.parametrize("rank", [0, 1])
def test_copies_are_made_the_first_members(monkeypatch, tensors, rank):
    """Copies of other members count as zero, unless they are not finite."""
    monkeypatch.setattr(collectives.distributed, "all_reduce", lambda flat, **_: Task())
    tensors[2][5] = float("nan")
    tensors[-1][0] = float("inf")
    collectives.equalize_packed(tensors, SimpleNamespace(rank=rank))
    for number, (tensor, n) in enumerate(zip(tensors, SIZES * 2, strict=True)):
        finite = tensor.astype("float32").flatten().tolist()
        if number in (2, len(tensors) - 1):
            bad = finite.pop(5 if number == 2 else 0)
            assert bad != bad or (rank == 0 and bad == float("inf"))
        assert finite == [n if rank == 0 else 0.0] * len(finite)


def test_tensors_move_together_and_stay_there():
    """A change of the flat tensor changes the tensors; a strided tensor becomes contiguous."""
    whole = paddle.arange(12, dtype="float32").reshape([3, 4])
    tensors = [paddle.ones([5, 7]), paddle.transpose(whole, [1, 0]), paddle.full([3], 2.0)]
    assert not tensors[1].is_contiguous()
    values = [tensor.numpy() for tensor in tensors]
    flat = collectives.flatten_in_place(tensors)
    flat.scale_(2.0)
    for tensor, value in zip(tensors, values, strict=True):
        assert tensor.is_contiguous()
        assert (tensor.numpy() == 2 * value).all()
    assert (whole.numpy().flatten() == range(12)).all()
    tensors[0].zero_()
    assert (flat.numpy()[:35] == 0).all() and (flat.numpy()[-3:] == 4).all()
    assert collectives.flatten_in_place(tensors[:1]) is tensors[0]


@pytest.mark.parametrize("alone", [True, False])
def test_a_gradient_with_strides_is_sent_whole(alone):
    """The gradient of a transposed weight has strides, which NCCL refuses."""
    weights = [paddle.create_parameter([4, 6], "float32") for _ in range(1 if alone else 2)]
    paddle.add_n([(weight.t() * paddle.arange(4, dtype="float32")).sum() for weight in weights]).backward()
    assert not weights[0].grad.is_contiguous()
    for start in (collectives.flatten_in_place, lambda grads: collectives._packed(grads, double)):
        start([weight.grad for weight in weights])
    for weight in weights:
        assert weight.grad.is_contiguous()
        assert (weight.grad.numpy() == 2 * weight.numpy() ** 0 * [[0], [1], [2], [3]]).all()


def double(flat):
    assert flat.is_contiguous()
    return Task(lambda: flat.scale_(2.0))
