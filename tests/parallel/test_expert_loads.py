"""Steps of mixtures of experts on one card give the same numbers with any micro batch size."""

from __future__ import annotations

import numpy as np
import pytest

from tests.parity import training

SMALL = {"Model.num_layers": 2, "Model.hidden_dropout_prob": 0.0}
MOE = "{{num_experts: 4, expert_ffn_size: 32, {}}}"
BIAS = "router: {bias: True}, bias_update_rate: 0.01"
RECOMPUTE = {"Model.use_recompute": True}


def build(moe: str, micro_batch_size: int, **more: object):
    import paddle

    with paddle.utils.unique_name.guard():
        extra = {**SMALL, "Model.moe": MOE.format(moe), **more}
        return training.build({}, 1, "llama", "sgd", micro_batch_size, extra)


def steps(moe: str, micro_batch_size: int, **more: object) -> tuple[list[float], dict[str, np.ndarray]]:
    """Losses, gradient norms and metrics of three steps, and the values of parameters without gradients."""
    cfg, ctx, runner = build(moe, micro_batch_size, **more)
    numbers = []
    for step in range(3):
        output = training.take_step(runner, step, cfg, ctx)
        numbers += [output.loss, output.grad_norm, *(metric.mean for metric in output.metrics.values())]
    named = runner.named_parameters()
    return numbers, {name: parameter.numpy() for name, parameter in named if ".router." in name}


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    "moe",
    [
        BIAS,
        "aux_loss: {kind: switch}",
        "aux_loss: {kind: gshard}, z_loss_weight: 0.01",
        "aux_loss: {kind: pooled}",
        "aux_loss: {kind: none}, router: {score: sigmoid, bias: True, num_groups: 2, top_groups: 1}, "
        "bias_update_rate: 0.01",
        "capacity: {factor: 0.75, policy: position}",
        "capacity: {factor: 0.75, policy: probs}, top_k: 3",
    ],
)
def test_micro_batches_and_recomputation_change_nothing(moe: str) -> None:
    expected, routers = steps(moe, training.GLOBAL_BATCH)
    for size, more in ((4, {}), (2, RECOMPUTE), (8, {"Model.loss_chunks": 3})):
        found, same = steps(moe, size, **more)
        np.testing.assert_allclose(found, expected, rtol=1e-5)
        for name, values in routers.items():
            np.testing.assert_allclose(same[name], values, rtol=1e-5, atol=1e-7, err_msg=name)


def test_jitter_is_noise_of_training_alone() -> None:
    (plain, _), (noisy, _) = (steps(f"router: {{jitter: {jitter}}}", 4) for jitter in (0, 0.2))
    assert not np.allclose(plain, noisy, rtol=1e-5)
    assert noisy == steps("router: {jitter: 0.2}", 4)[0]
