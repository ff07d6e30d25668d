"""Owners of parameters among sharding ranks, and gradients with strides."""

from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import numpy as np
import paddle
import pytest
from paddle import distributed

from ppfleetx.config.parallel_plan import ParallelPlan
from ppfleetx.distributed.context import ParallelContext
from ppfleetx.nn.fused_ops import FusedOps
from ppfleetx.nn.init import Constant
from ppfleetx.nn.param_spec import PARTIAL, ParamSpec, Shard, dense
from ppfleetx.nn.stage import declare
from ppfleetx.optims.gradients import add_gradient, gradient_of, scale_to_norm, squared_norm, take_gradient
from ppfleetx.parallel.sharding import Sharding
from tests.models.gpt_builders import build, tiny_config

GROUP = SimpleNamespace(nranks=2, rank=0, ranks=[0, 1])
CTX = ParallelContext(ParallelPlan(sharding=2), groups={"sharding": GROUP})


@pytest.mark.parametrize("trains", [False, True], ids=["frozen", "trained"])
def test_frozen_and_trained_values_are_both_shared_evenly(trains):
    parameters = build(tiny_config(lora={"rank": 4})).parameters()
    kinds = [[p for p in parameters if p.stop_gradient is not wanted] for wanted in (True, False)]
    sharding = Sharding(kinds[0], CTX, stage=1, frozen=kinds[1])
    chosen = kinds[0] if trains else kinds[1]
    assert all(p.stop_gradient is not trains for p in chosen)
    total, held = sum(p.size for p in chosen), sum(p.size for p in chosen if sharding.owns(p))
    largest = max(p.size for p in chosen)
    assert abs(2 * held - total) <= largest


def parameters_with_gradients(strides, in_main):
    """Two parameters with one gradient each, strided like that of a transposed weight, and in ``main_grad``
    if wanted."""
    parameters = [paddle.create_parameter([4, 6], "float32") for _ in range(2)]
    paddle.add_n([(p.t() * paddle.arange(4, dtype="float32")).sum() for p in parameters]).backward()
    for number, parameter in enumerate(parameters):
        assert not parameter.grad.is_contiguous()
        declare(parameter, replace(dense((4, 6), Constant(), "matrix"), name=f"weight {number}"))
        gradient = paddle.to_tensor(parameter.grad.numpy())
        if strides:
            gradient = paddle.transpose(paddle.to_tensor(gradient.numpy().T), [1, 0])
        assert gradient.is_contiguous() is not strides
        if in_main:
            parameter.clear_gradient(False)
            parameter.main_grad = gradient
        elif not strides:
            parameter.clear_gradient(False)
            parameter.grad = gradient
    return parameters


def taken(parameters):
    gradients = [take_gradient(parameter) for parameter in parameters]
    assert all(gradient_of(parameter) is None for parameter in parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        add_gradient(parameter, gradient)
        add_gradient(parameter, paddle.ones_like(gradient))


def clipped(parameters, **fused):
    ops = FusedOps({name: ["float32"] for name in fused})
    norm = squared_norm(parameters, ops).sqrt().item()
    assert norm > 0.5
    scale_to_norm(parameters, norm, 0.5, ops)


def messages_at_the_end(sharding):
    """The sizes of the messages in which the gradients of a step leave."""
    sizes = []

    def reduce(flat, destination, group, sync_op):
        assert flat.is_contiguous()
        sizes.append(flat.size)
        return SimpleNamespace(wait=lambda: None)

    with mock.patch.object(distributed, "reduce", reduce):
        sharding.finish_gradients()
    return sizes


def sent(parameters):
    """Send gradients to another owner as in stage 2, with overlap."""
    sharding = Sharding(parameters, CTX, stage=2, bucket_bytes=1 << 20)
    sharding.owners = dict.fromkeys(sharding.owners, 0)
    assert sum(messages_at_the_end(sharding)) >= 48  # and zeros, up to where the next begins


@pytest.mark.parametrize("in_main", [False, True], ids=["grad", "main_grad"])
@pytest.mark.parametrize(
    "work",
    [taken, clipped, lambda ps: clipped(ps, grad_norm=1, grad_scale=1), sent],
    ids=["taken", "clipped", "clipped by fused operators", "sent"],
)
def test_strides_of_a_gradient_change_nothing(work, in_main):
    """On a GPU, Paddle gives strides to gradients that have none on a CPU
    (FLAGS_use_stride_compute_kernel)."""
    results = []
    for strides in (False, True):
        parameters = parameters_with_gradients(strides, in_main)
        work(parameters)
        found = [gradient_of(parameter) for parameter in parameters]
        results.append([None if one is None else one.numpy() for one in found])
    np.testing.assert_array_equal(results[1], results[0])


@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_of_experts_leave_in_messages_of_the_bucket_size(stage):
    """They are sent at the end of a step, when the memory of one message for all of them may be missing."""
    ctx = ParallelContext(ParallelPlan(sharding=2), groups={"edp": GROUP, "sharding": GROUP})
    parameters = [paddle.create_parameter([4, 8, 8], "float32") for _ in range(8)]
    for number, parameter in enumerate(parameters):
        spec = ParamSpec((4, 8, 8), value={"ep": Shard(0)}, grad={"edp": PARTIAL}, name=f"expert {number}")
        declare(parameter, spec, ctx.mesh, 0)
        parameter.grad = paddle.full(parameter.shape, float(number))
    sharding = Sharding(parameters, ctx, stage=stage, bucket_bytes=2048)
    sharding.begin(1)
    sizes = messages_at_the_end(sharding)
    assert sum(sizes) == 8 * 256
    assert max(sizes) <= 512
    for number, parameter in enumerate(parameters):
        kept = gradient_of(parameter)
        assert (kept is not None) == sharding.owns(parameter)
        assert kept is None or (kept == number).all()
