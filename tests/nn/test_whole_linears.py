"""Adapters and learned bounds of linears that every tensor-parallel rank holds in full."""

from __future__ import annotations

import numpy as np
import pytest

GRADIENTS = "tests.nn.test_whole_linears:gradients"


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("input_is_sequence_parallel", [False, True])
def test_gradients_are_those_of_one_card(pools, sequence_parallel, input_is_sequence_parallel):
    (one,) = pools(1).run(
        GRADIENTS, mp=1, sequence_parallel=False, input_is_sequence_parallel=input_is_sequence_parallel
    )
    for rank in pools(2).run(
        GRADIENTS,
        mp=2,
        sequence_parallel=sequence_parallel,
        input_is_sequence_parallel=input_is_sequence_parallel,
    ):
        assert set(rank) == set(one) == {"weight", "quant.weight_clip", "quant.input_clip", "a", "b"}
        for name, values in one.items():
            assert any(values), name
            assert rank[name] == pytest.approx(values, rel=1e-5, abs=1e-6), name


# -- in the ranks


def gradients(mp: int, sequence_parallel: bool, input_is_sequence_parallel: bool) -> dict[str, list[float]]:
    """Gradients of an adapter and of learned bounds, summed over ranks according to their declarations."""
    import paddle
    from paddle import distributed

    from ppfleetx.config.sections.compress import QuantizationConfig
    from ppfleetx.config.sections.lora import LoraConfig
    from ppfleetx.nn.fake_quant import quantize_linear
    from ppfleetx.nn.init import Constant
    from ppfleetx.nn.layer_factory import LocalFactory, TensorParallelFactory
    from ppfleetx.nn.layer_spec import LinearSpec
    from tests.distributed.cpu.cases import group_of

    group = group_of(list(range(mp))) if mp > 1 else None
    factory = LocalFactory() if group is None else TensorParallelFactory(group, sequence_parallel)
    linear = factory.linear(
        LinearSpec(6, 4, "whole", False, Constant(), input_is_sequence_parallel=input_is_sequence_parallel)
    )
    clips = {f"{part}_preprocess_type": "PACT" for part in ("weight", "activation")}
    cfg = QuantizationConfig(enable=True, activation_quantize_type="abs_max", weight_bits=4, **clips)
    quantize_linear(linear, factory.quantizer(linear, cfg, follows=True))
    branch = factory.lora(linear, LoraConfig(rank=2))
    rng = np.random.default_rng(0)
    named = [*linear.named_parameters(), *branch.named_parameters()]
    for name, parameter in named:
        if "clip" not in name:
            parameter.set_value(rng.standard_normal(parameter.shape).astype("float32"))
    x, factors = (rng.standard_normal([8, 1, width]).astype("float32") for width in (6, 4))
    if input_is_sequence_parallel and sequence_parallel:
        x, factors = (np.split(array, mp)[group.rank] for array in (x, factors))
    x = paddle.to_tensor(x)
    ((linear(x) + branch(x)) * paddle.to_tensor(factors)).sum().backward()
    for _, parameter in named:
        if mp > 1 and parameter.spec.sums("mp"):
            distributed.all_reduce(parameter.grad, group=group)
    return {name: parameter.grad.flatten().tolist() for name, parameter in named}
