"""A user's program with fleet's layers on the CPU process groups: each plan gives the losses of one
process."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.distributed import fleet
from paddle.distributed.fleet import meta_parallel as mpu

from ppfleetx.distributed.cpu import backend as cpu_backend

TRAIN = "tests.distributed.cpu.test_fleet:train"


@pytest.mark.parametrize("degrees", [{"mp": 2}, {"sharding": 2}, {"dp": 2, "mp": 2}], ids=str)
def test_a_plan_equals_serial(pools, degrees) -> None:
    expected = pools(1).run(TRAIN)[0]
    assert expected[-1] < expected[0]
    size = 1
    for degree in degrees.values():
        size *= degree
    found = pools(size).run(TRAIN, **degrees)
    means = [sum(losses) / size for losses in zip(*found, strict=True)]
    assert means == pytest.approx(expected, rel=1e-6)


# -- in the ranks

VOCAB, HIDDEN, SEQ, BATCH = 64, 16, 8, 8


class Model(nn.Layer):
    """Embedding, MLP and loss. Weights are slices of arrays drawn from their names."""

    def __init__(self, mp: int) -> None:
        super().__init__()
        if mp == 1:
            self.words, self.up = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, 4 * HIDDEN)
            self.down, self.head = nn.Linear(4 * HIDDEN, HIDDEN), nn.Linear(HIDDEN, VOCAB)
            self.loss = nn.CrossEntropyLoss(reduction="none")
        else:
            self.words = mpu.VocabParallelEmbedding(VOCAB, HIDDEN)
            self.up = mpu.ColumnParallelLinear(HIDDEN, 4 * HIDDEN, has_bias=True, gather_output=False)
            self.down = mpu.RowParallelLinear(4 * HIDDEN, HIDDEN, has_bias=True, input_is_parallel=True)
            self.head = mpu.ColumnParallelLinear(HIDDEN, VOCAB, has_bias=True, gather_output=False)
            self.loss = mpu.ParallelCrossEntropy()
        axes = {"words.weight": 0, "up.weight": 1, "up.bias": 0, "down.weight": 0}
        axes |= {"head.weight": 1, "head.bias": 0}
        for seed, (name, parameter) in enumerate(self.named_parameters()):
            axis, shape = axes.get(name), list(parameter.shape)
            if mp > 1 and axis is not None:
                shape[axis] *= mp
            value = 0.1 * np.random.default_rng(seed).standard_normal(shape).astype("float32")
            if mp > 1 and axis is not None:
                rank = fleet.get_hybrid_communicate_group().get_model_parallel_rank()
                value = np.split(value, mp, axis)[rank]
            parameter.set_value(value)

    def forward(self, tokens: paddle.Tensor, labels: paddle.Tensor) -> paddle.Tensor:
        hidden = self.words(tokens)
        hidden = hidden + self.down(nn.functional.gelu(self.up(hidden)))
        return self.loss(self.head(hidden), labels.unsqueeze(-1)).mean()


def train(dp: int = 1, mp: int = 1, sharding: int = 1) -> list[float]:
    """Losses of four steps on this rank's rows."""
    is_alone = dp * mp * sharding == 1
    with paddle.utils.unique_name.guard():
        if not is_alone:
            cpu_backend.install()
            fleet.base.topology._HYBRID_PARALLEL_GROUP = None  # of a plan before in this process
            strategy = fleet.DistributedStrategy()
            strategy.hybrid_configs = {"dp_degree": dp, "mp_degree": mp, "sharding_degree": sharding}
            strategy.hybrid_configs["mp_configs"].need_broadcast_data = False
            fleet.init(is_collective=True, strategy=strategy)
        model = Model(mp)
        clip = nn.ClipGradByGlobalNorm(0.5)
        optimizer = paddle.optimizer.AdamW(1e-2, parameters=model.parameters(), grad_clip=clip)
        part, parts = 0, dp * sharding
        if not is_alone:
            hcg = fleet.get_hybrid_communicate_group()
            part = hcg.get_data_parallel_rank() * sharding + hcg.get_sharding_parallel_rank()
            model, optimizer = fleet.distributed_model(model), fleet.distributed_optimizer(optimizer)
        losses = []
        for step in range(4):
            batch = np.random.default_rng(1000 + step % 2).integers(0, VOCAB, (BATCH, SEQ + 1))
            rows = np.split(batch, parts)[part]
            loss = model(paddle.to_tensor(rows[:, :-1]), paddle.to_tensor(rows[:, 1:]))
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()
            losses.append(loss.item())
    return losses
