"""The runner of a model in one process: how it is built, and how often a step waits for the device."""

from pathlib import Path

import numpy as np
import paddle
import pytest

from ppfleetx.commands.train import build_runner
from ppfleetx.config.loader import load_config
from ppfleetx.distributed.context import ParallelContext
from ppfleetx.nn import stage
from ppfleetx.parallel.step_metrics import sum_of
from tests.parity.training import build, micro_batches, take_step

NANO = Path(__file__).resolve().parents[2] / "ppfleetx/configs/debug/gpt_nano.yaml"


def test_a_step_reads_once(monkeypatch):
    """The loss and the gradient norm together, whatever the number of micro batches."""
    cfg, ctx, runner = build({}, 1, "gpt", "adamw", 4, {"Model.num_layers": 1})
    take_step(runner, 0, cfg, ctx)
    reads = []
    for name in ("item", "numpy", "tolist"):
        original = getattr(paddle.Tensor, name)

        def counting(self, *args, original=original, name=name):
            reads.append(name)
            return original(self, *args)

        monkeypatch.setattr(paddle.Tensor, name, counting)
    take_step(runner, 1, cfg, ctx)
    assert cfg.batch.accumulate_steps == 4
    assert reads == ["numpy"]


def test_counts_that_are_known_are_not_asked_for_again(monkeypatch):
    """The engine sends the divisors of all metrics along with what the ranks tell each other anyway."""
    import examples.penalized_gpt  # noqa: F401 registers the architecture

    cfg, ctx, runner = build({}, 1, "gpt", "sgd", 4, {"Model.name": "PenalizedGPT", "Model.num_layers": 1})
    monkeypatch.setattr(ParallelContext, "sum_over", None)
    batch = micro_batches(0, cfg, ctx)
    found = runner.train_step(batch, step=1, lr=0.1, weight_decay=0.0, counts=runner.count(batch))
    assert found.metrics["trunk_size"].count == found.num_valid_tokens


def test_sum_of_losses_is_that_of_the_host():
    values = [1.0, 2.5e-7, 3.25, 1e8]
    losses = [paddle.to_tensor(value, dtype="float32") for value in values]
    assert sum_of(losses).item() == sum(loss.item() for loss in losses)
    assert sum_of([]).item() == 0.0


def test_weights_that_a_checkpoint_brings_are_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, draw = [], stage.draw
    monkeypatch.setattr(
        stage, "draw", lambda init, seed, name, *at: drawn.append(name) or draw(init, seed, name, *at)
    )
    runners = {}
    for train in (True, False):
        drawn.clear()
        runners[train] = build_runner(load_config(NANO), ParallelContext.single(), train=train)
        names = [name for name, _ in runners[train].named_parameters()]
        assert drawn == (names if train else [])
    trained, empty = (dict(runner.named_parameters()) for runner in runners.values())
    assert trained.keys() == empty.keys()
    for name, parameter in empty.items():
        assert parameter.shape == trained[name].shape
        assert len(np.unique(parameter.numpy())) == 1, "what Paddle fills in without drawing"
